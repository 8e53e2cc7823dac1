"""Directories of weights: what is in them; those of processes that have ended are deleted, those of others are left alone."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.bases import load, random_adapter
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_written_as_passes_read_it(dtype: str, family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    base = load(family_dir("qwen3"), dtype=dtype)
    adapter = random_adapter(base)
    files = WeightFiles(base, str(tmp_path))
    written = load_file(files.write(adapter) / "adapter_model.safetensors")
    assert len(written) == len(adapter.leaves())
    for name, pair in adapter.working.items():
        for side, matrix in (("A", pair.a), ("B", pair.b)):
            found = written[f"base_model.model.{base.layout.module_name(name)}.lora_{side}.weight"]
            assert found.dtype == base.dtype
            assert torch.equal(found, matrix.detach())
    files.close()
