"""The real SDK against a real server process. One server with a text and a vision model serves most of these tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import tinker

from tests.running import Server, serving

API_KEY = "tml-acceptance"


@pytest.fixture(scope="session")
def models(family_dir: Callable[[str], Path]) -> list[str]:
    """--base-model options for the two models."""
    return ["--base-model", f"text={family_dir('qwen3')}", "--base-model", f"vision={family_dir('qwen3_vl')}", "--kv-cache-gib", "0.1"]


@pytest.fixture(scope="session")
def text_only(family_dir: Callable[[str], Path]) -> list[str]:
    """Options of a server that is there soon."""
    return ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1"]


@pytest.fixture(scope="session")
def server(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A running server."""
    with serving(tmp_path_factory.mktemp("server"), *models) as running:
        running.wait_for_health()
        yield running


@pytest.fixture(scope="session")
def chunking_server(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that makes the SDK send every datum in a request of its own."""
    with serving(tmp_path_factory.mktemp("chunking"), *models, "--fwdbwd-max-chunk-len", "1", "--tokens-per-pass", "24") as running:
        running.wait_for_health()
        yield running


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    """An SDK client of the server."""
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture
def rest(server: Server) -> tinker.RestClient:
    """An SDK client of runs, checkpoints and sessions. It has no session of its own."""
    return tinker.RestClient(base_url=server.url, api_key=API_KEY)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    """The server without the SDK, for what the SDK would not send."""
    with server.client() as client:
        client.headers["X-API-Key"] = API_KEY
        yield client
