"""The real SDK against a real server process. One server with a text and a vision model serves most of these tests."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tinker

from tests.running import Server, serving

API_KEY = "tml-acceptance"


@contextmanager
def ready(directory: Path, *options: str) -> Iterator[Server]:
    """A server that takes work; its log and data lie in `directory`."""
    with serving(directory, *options) as running:
        running.wait_for_health()
        yield running


def connect(server: Server) -> tinker.ServiceClient:
    """An SDK client; with `with`, its session ends at the end."""
    return tinker.ServiceClient(base_url=server.url, api_key=API_KEY)


@contextmanager
def without_sdk(server: Server) -> Iterator[httpx.Client]:
    """An HTTP client with a key, for what the SDK would not send."""
    with server.client() as client:
        client.headers["X-API-Key"] = API_KEY
        yield client


@pytest.fixture(scope="session")
def models(family_dir: Callable[[str], Path]) -> list[str]:
    """--base-model options for the two models."""
    return [
        "--base-model",
        f"text={family_dir('qwen3')}",
        "--base-model",
        f"vision={family_dir('qwen3_vl')}",
        "--kv-cache-gib",
        "0.1",
    ]


@pytest.fixture(scope="session")
def text_only(family_dir: Callable[[str], Path]) -> list[str]:
    """Options of a server that is there soon."""
    return ["--base-model", f"text={family_dir('qwen3')}", "--kv-cache-gib", "0.1"]


@pytest.fixture(scope="session")
def server(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ready(tmp_path_factory.mktemp("server"), *models) as running:
        yield running


@pytest.fixture(scope="session")
def chunking_server(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that makes the SDK send every datum in a request of its own, and wait when a MiB of them is queued."""
    options = ["--fwdbwd-max-chunk-len", "1", "--tokens-per-pass", "24", "--max-queued-session-mib", "1"]
    with ready(tmp_path_factory.mktemp("chunking"), *models, *options) as running:
        yield running


@pytest.fixture
def service(server: Server) -> Iterator[tinker.ServiceClient]:
    with connect(server) as client:
        yield client


@pytest.fixture
def rest(server: Server) -> tinker.RestClient:
    """An SDK client of runs, checkpoints and sessions. It has no session of its own."""
    return tinker.RestClient(base_url=server.url, api_key=API_KEY)


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with without_sdk(server) as client:
        yield client


@contextmanager
def for_applications(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a text model, one that sees, and one whose chat template has tools."""
    directory = tmp_path_factory.mktemp("tools")
    shutil.copytree(family_dir("qwen3"), directory, dirs_exist_ok=True)
    shutil.copy(Path(__file__).parents[1] / "chat" / "tools.jinja", directory / "chat_template.jinja")
    served = {"text": family_dir("qwen3"), "vision": family_dir("qwen3_vl"), "tools": directory}
    options = [part for name, place in served.items() for part in ("--base-model", f"{name}={place}")]
    with ready(tmp_path_factory.mktemp("server"), *options, "--kv-cache-gib", "0.1") as running:
        yield running
