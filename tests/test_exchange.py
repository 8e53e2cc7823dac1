"""Exports without a server, from the checkpoints that an import has made."""

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bases import random_adapter
from tests.running import tinsmith_here
from tinsmith.exchange import import_adapter
from tinsmith.models.base import BaseModel
from tinsmith.store.store import Store
from tinsmith.training.peft_format import write_peft


@pytest.fixture
def base(family_dir: Callable[[str], Path]) -> Path:
    """The directory of a base model."""
    return family_dir("qwen3")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory that holds nothing yet."""
    (tmp_path / "data").mkdir()
    Store.open(tmp_path / "data").close()
    return tmp_path / "data"


@pytest.fixture
def checkpoint(data: Path, base: Path, text_base: BaseModel, tmp_path: Path) -> str:
    """The path of an imported adapter."""
    write_peft(random_adapter(text_base, rank=64), text_base.layout, "x", tmp_path / "adapter")
    return import_adapter(data, tmp_path / "adapter", "a", f"text={base}")[0]


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("merge", [[], ["--merge"]], ids=["adapter", "merged"])
@pytest.mark.parametrize("there", [False, True], ids=["absent", "empty"])
def test_an_export_that_fails_leaves_nothing_and_can_be_repeated(
    merge: list[str], there: bool, checkpoint: str, data: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out" / "model"
    if there:
        target.mkdir(parents=True)
    command = ["export", checkpoint, str(target), "--data-dir", str(data), *merge]
    with files_up_to(100_000):
        failed = tinsmith_here(*command)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1), failed.stderr
    assert failed.stderr.startswith(f"tinsmith: {target} cannot be written: ")
    assert target.exists() == there
    assert list((tmp_path / "out").rglob("*")) == [target] * there
    assert tinsmith_here(*command).returncode == 0
    assert target.stat().st_mode == (tmp_path / "out").stat().st_mode
    assert "config.json" in {file.name.removeprefix("adapter_") for file in target.iterdir()}
