"""Real vLLM servers. One takes a minute to start, so `make test-vllm` starts four, and those again that tests kill.

- `server` takes texts and images: numbers, parameters, adapters, inflight samples. `test_a_sampler.py` comes first: it
  shares the vLLM
  server, which is one engine's alone once full weights were sent. `test_servers.py` kills it: it starts again by
  itself.
- `hybrid_server` has a model of gated delta nets, for numbers, and takes turns with its trainer. `each_service` is a
  client of both.
- `two_workers` of `test_several_workers.py` train beside a vLLM server that divides its model over two processes.
- `sampling_server` of `test_sampling_only.py` trains nothing. Its worker and its engine are killed last.

Whatever else starts a vLLM server is marked `slow`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from tests.running import Server
from tests.with_vllm.serving import ON_GPU, PYTHON, sampling_with_vllm, wait_for_vllm
from tinsmith.models.tiny import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def vllm_is_there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Stop where there is nothing to test.

    What vLLM has kept of earlier runs is left out: it starts as on a fresh machine.
    """
    if not PYTHON.exists():
        pytest.exit(f"{PYTHON} is missing: run `make test-vllm`, which sets it up", returncode=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)  # it is meant for our own kernels
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm-cache")))
        yield


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that takes images."""
    directory = tmp_path_factory.mktemp("vision")
    write_tiny_model("qwen3-vl", directory)
    return directory


@pytest.fixture(scope="session")
def server(vision_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that samples the tiny vision model with a vLLM server of its own, in float32."""
    with sampling_with_vllm(tmp_path_factory.mktemp("server"), "--base-model", f"tiny={vision_dir}") as running:
        yield running


@pytest.fixture(scope="session")
def hybrid_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The same with a model most of whose layers are gated delta nets, which vLLM does not serve on a GPU.

    Its turns are short.
    """
    directory = tmp_path_factory.mktemp("hybrid")
    write_tiny_model("qwen3-vl" if ON_GPU else "qwen3-5", directory)
    options = ("--base-model", f"tiny={directory}", "--vllm-turn-s", "1")
    with sampling_with_vllm(tmp_path_factory.mktemp("hybrid-server"), *options) as running:
        yield running


@pytest.fixture
def socket(server: Server) -> str:
    """Where the server's vLLM server listens now: a test before may have killed the one before."""
    return wait_for_vllm(server)


@pytest.fixture
def service(server: Server, socket: str) -> Iterator[tinker.ServiceClient]:
    """An SDK client of the server, once vLLM is ready."""
    assert socket
    with tinker.ServiceClient(base_url=server.url, api_key="tml-vllm") as client:
        yield client


@pytest.fixture(params=["server", "hybrid_server"])
def each_service(request: pytest.FixtureRequest) -> Iterator[tinker.ServiceClient]:
    """An SDK client of both servers, one after the other: for tests of numbers."""
    running: Server = request.getfixturevalue(request.param)
    wait_for_vllm(running)
    with tinker.ServiceClient(base_url=running.url, api_key="tml-each") as client:
        yield client
