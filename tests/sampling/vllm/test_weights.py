"""Directories of weights: those of processes that have ended are deleted, those of others are left alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.weights import WeightFiles


@pytest.fixture
def living() -> Iterator["subprocess.Popen[bytes]"]:
    """A process that goes on until its input ends."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_only_directories_of_processes_that_have_ended_are_deleted(
    living: "subprocess.Popen[bytes]", text_base: BaseModel, tmp_path: Path
) -> None:
    """Process 1 belongs to the system; a name without a process id to somebody else."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (f"{dead.pid}-a", f"{living.pid}-b", f"{os.getpid()}-c", "1-d", "mine"):
        (tmp_path / f"tinsmith-weights-{name}").mkdir()
    files = WeightFiles(text_base, str(tmp_path))
    left = {path.name.removeprefix("tinsmith-weights-") for path in tmp_path.iterdir()} - {
        files.root.name.removeprefix("tinsmith-weights-")
    }
    assert left == {f"{living.pid}-b", f"{os.getpid()}-c", "1-d", "mine"}
    files.close()
    assert not files.root.exists()
    living.kill()
    living.wait()
    WeightFiles(text_base, str(tmp_path)).close()
    assert not (tmp_path / f"tinsmith-weights-{living.pid}-b").exists()
