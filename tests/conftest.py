"""Base models that several rooms test with. They never change, so one of each serves the whole run."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if os.environ.get("TINSMITH_TEST_DEVICE", "cpu") == "cpu":
    # Triton reads it when it is imported, which transformers does; its kernels then compute on a CPU
    os.environ["TRITON_INTERPRET"] = "1"
# As the server has it: threads that spin take the cores from other processes
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Here and in what tests start: threads waited for each other a tenth of the time
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.crashes import pytest_testnodedown
from tests.extent import EVERYTHING
from tests.preloaded import replace_python

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, here and in all that tests start
replace_python(serve="TRITON_INTERPRET" in os.environ)  # on a GPU nothing is forked: CUDA does not survive it

if TYPE_CHECKING:
    from tests.databases import PostgreSQL
    from tinsmith.models.base import BaseModel

__all__ = ["pytest_testnodedown"]  # a hook

settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machines")

ALONE = "TINSMITH_TEST_ALONE"
"""Set in the process of a test that is marked `alone`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `slow`, unless everything is asked for.

    TINSMITH_TEST_ORDER is a seed: the order is random then.
    """
    left_out = [item for item in items if item.get_closest_marker("slow") and not EVERYTHING]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    if order := os.environ.get("TINSMITH_TEST_ORDER"):
        random.Random(order).shuffle(items)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is marked `alone` in a process of its own: it limits its process, in which other tests have left
    threads."""
    if pyfuncitem.get_closest_marker("alone") is None or ALONE in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", pyfuncitem.nodeid, "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {ALONE: "1"}
    ended = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr
    return True


def pytest_report_header() -> list[str]:
    """On a GPU: which one, and with which libraries. `make test-gpu` keeps what it prints."""
    from tests.bases import DEVICE

    if DEVICE == "cpu":
        return []
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    libraries = [f"{name} {metadata.version(name)}" for name in ("torch", "triton", "transformers")]
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return [
        (
            f"{torch.cuda.get_device_name()}, {', '.join(libraries)}, commit "
            f"{os.environ.get('COMMIT') or commit or 'unknown'}, {day}"
        )
    ]


@pytest.fixture(autouse=True)
def level_of_the_log() -> Iterator[None]:
    """A test that starts a command here sets the level of the log; those behind it would find more lines in theirs."""
    logger = logging.getLogger("tinsmith")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As if nobody had asked for another number of threads; other tests compute with one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def postgresql() -> "Iterator[PostgreSQL]":
    """A running PostgreSQL. Tests that stop it start one of their own."""
    from tests.databases import running

    with running() as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], object]:
    """Run the test on both databases: of the data directory `tmp_path`, and those that the function is given."""
    if request.param == "sqlite":
        return lambda data_dir: None
    cluster: PostgreSQL = request.getfixturevalue("postgresql")
    cluster.serve(tmp_path)
    return cluster.serve


@pytest.fixture(scope="session")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of the tiny model of a family, made on first use."""
    from tests.bases import write_family

    @cache
    def make(model_type: str) -> Path:
        directory = tmp_path_factory.mktemp(model_type)
        write_family(model_type, directory)
        return directory

    return make


@pytest.fixture(scope="session")
def family_base(family_dir: Callable[[str], Path]) -> "Callable[[str], BaseModel]":
    """The loaded tiny model of a family."""
    from tests.bases import load

    @cache
    def make(model_type: str) -> "BaseModel":
        return load(family_dir(model_type))

    return make


@pytest.fixture(scope="session")
def text_base(family_base: "Callable[[str], BaseModel]") -> "BaseModel":
    """A text model (Qwen3)."""
    return family_base("qwen3")


@pytest.fixture(scope="session")
def vision_base(family_base: "Callable[[str], BaseModel]") -> "BaseModel":
    """A model that takes images (Qwen3-VL)."""
    return family_base("qwen3_vl")


@pytest.fixture(scope="session")
def hybrid_base(family_base: "Callable[[str], BaseModel]") -> "BaseModel":
    """A tiny model most of whose layers are gated delta nets. Tests must not change it."""
    return family_base("qwen3_5")
