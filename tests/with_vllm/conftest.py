"""Real vLLM servers. The tests share them, because one takes a minute to start: four starts in all, of which one is never finished."""

import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import tinker

from tests.running import Server, serving
from tinsmith.models.tiny import write_tiny_model

PYTHON = Path(os.environ.get("TINSMITH_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
"""Of the environment that vLLM is installed in."""

READY_S = 300.0
"""How long a vLLM server may take to start on a busy machine."""


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there() -> None:
    """Stop where there is nothing to test."""
    if not PYTHON.exists():
        pytest.exit(f"{PYTHON} is missing: run `make test-vllm`, which sets it up", returncode=2)


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes pictures."""
    directory = tmp_path_factory.mktemp("vision")
    write_tiny_model("qwen3-vl", directory)
    return directory


@pytest.fixture(scope="session")
def server(vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that samples the tiny vision model with a vLLM server of its own, in float32."""
    with sampling_with_vllm(tmp_path_factory.mktemp("server"), "--base-model", f"tiny={vision_dir}") as running:
        yield running


def sampling_with_vllm(directory: Path, *options: str) -> AbstractContextManager[Server]:
    """A server with vLLM servers in small."""
    small = ("--max-context", "1024", "--kv-cache-gib", "1", "--max-lora-rank", "32", "--max-running", "64")
    return serving(directory, "--sampler", "vllm", "--vllm-python", str(PYTHON), *small, *options)


@pytest.fixture(scope="session")
def socket(server: Server) -> str:
    """Where the server's vLLM server listens."""
    return wait_for_vllm(server)


@pytest.fixture
def service(server: Server, socket: str) -> Iterator[tinker.ServiceClient]:
    """An SDK client of the server, once vLLM is ready."""
    assert socket
    with tinker.ServiceClient(base_url=server.url, api_key="tml-vllm") as client:
        yield client


def wait_for_vllm(server: Server, starts: int = 1) -> str:
    """The address of its vLLM server, as soon as one has got ready for the so-manieth time."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and server.process.poll() is None:
        ready = re.findall(r"vLLM server at (\S+) is ready", server.log.read_text())
        if len(ready) >= starts:
            return str(ready[starts - 1])
        time.sleep(0.1)
    raise AssertionError(server.log.read_text())
