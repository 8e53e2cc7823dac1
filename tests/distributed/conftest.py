"""Servers with one worker and with two, for all tests here: each starts once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinker

from tests.distributed.devices import SERVER_OPTIONS, require_devices
from tests.running import Server, serving

LONG = 200
"""Tokens from which the two workers compute a sequence together."""


@dataclass(frozen=True)
class Running:
    """A server and a client of it."""

    server: Server
    service: tinker.ServiceClient
    data_dir: Path


@pytest.fixture(scope="session")
def options(family_dir: Callable[[str], Path]) -> list[str]:
    """A text model, one that takes pictures, and a hybrid one. Passes are small, so that a request needs several."""
    require_devices(2)
    named = {"text": "qwen3", "image": "qwen3_vl", "hybrid": "qwen3_5"}
    models = [option for name, family in named.items() for option in ("--base-model", f"{name}={family_dir(family)}")]
    return [*models, "--kv-cache-gib", "0.05", "--tokens-per-pass", "64", *SERVER_OPTIONS]


@pytest.fixture(scope="session")
def alone_and_together(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Running]]:
    """A server with one worker, and one with two."""
    with ExitStack() as stack:
        started = []
        for count in (1, 2):
            directory = tmp_path_factory.mktemp(f"workers{count}")
            together = ["--sequence-parallel-from", str(LONG)] if count > 1 else []
            server = stack.enter_context(serving(directory, *options, "--workers", str(count), *together))
            started.append((server, directory / "data"))
        running = []
        for server, data_dir in started:
            server.wait_for_health()
            service = stack.enter_context(tinker.ServiceClient(base_url=server.url, api_key="tml-workers"))
            running.append(Running(server, service, data_dir))
        yield running
