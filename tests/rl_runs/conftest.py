"""One server for the learning runs, and where their curves go."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.running import serving
from tinsmith.models.tiny import write_tiny_model

OUTPUT = Path("rl-output")


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with the models `tiny` and `tiny-vl`."""
    directory = tmp_path_factory.mktemp("rl-server")
    write_tiny_model("qwen3", directory / "tiny")
    write_tiny_model("qwen3-vl", directory / "tiny-vl")
    options = [part for name in ("tiny", "tiny-vl") for part in ("--base-model", f"{name}={directory / name}")]
    with serving(directory, *options, "--kv-cache-gib", "0.25") as server:
        server.wait_for_health()
        yield server.url


@pytest.fixture(scope="session")
def curves() -> Path:
    """The folder of the pictures."""
    OUTPUT.mkdir(exist_ok=True)
    return OUTPUT
