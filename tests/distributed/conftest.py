"""Servers with one worker and with two, and the findings of processes, for all tests here: each starts once."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import tinker

from tests.bases import write_decoder
from tests.distributed.devices import SERVER_OPTIONS, require_devices
from tests.distributed.members import Ended, Processes, run
from tests.running import Server, serving

LONG = 200
"""Tokens from which the two workers compute a sequence together."""
BASES = {
    "text": "qwen3",
    "image": "qwen3_vl",
    "hybrid": "qwen3_5",
    "window": "mistral",
    "experts": "qwen3_vl_moe",
    "hybrid experts": "qwen3_5_moe",
    "sinks": "gpt_oss",
}


@dataclass(frozen=True)
class Running:
    """A server and a client of it."""

    server: Server
    service: tinker.ServiceClient
    data_dir: Path


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory, family_dir: Callable[[str], Path]) -> Path:
    """The directories of tiny models: those of BASES, and `deep`, which has many layers."""
    directory = tmp_path_factory.mktemp("bases")
    for name, family in BASES.items():
        (directory / name).symlink_to(family_dir(family))
    write_decoder("qwen3", directory / "deep", num_hidden_layers=8, head_dim=16)
    return directory


@pytest.fixture(scope="session")
def processes(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Processes:
    """They run on first use."""

    @cache
    def ended(module: str, count: int) -> Ended:
        directory = tmp_path_factory.mktemp(f"{count} processes")
        (directory / "bases").symlink_to(bases)
        return run(module, count, directory)

    return ended


@pytest.fixture(scope="session")
def options(bases: Path) -> list[str]:
    """A text model, one that takes images, a hybrid one and one of experts.

    Passes are small, so that a request needs several.
    """
    require_devices(2)
    names = ("text", "image", "hybrid", "experts")
    models = [option for name in names for option in ("--base-model", f"{name}={bases / name}")]
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
