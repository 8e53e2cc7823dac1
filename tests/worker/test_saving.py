"""Saves are written beside the device: nobody waits for another's, and what is written is what the model was when it was saved."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.here import LONG_S, Here
from tinsmith.models.base import BaseModel
from tinsmith.training.checkpoint import SavedState, read_state, write_state


class SlowDisk:
    """Takes files only once it is `released`."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def write_state(self, state: SavedState, directory: Path) -> None:
        self.reached.set()
        assert self.released.wait(LONG_S)
        write_state(state, directory)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    slow = SlowDisk()
    monkeypatch.setattr("tinsmith.worker.models.write_state", slow.write_state)
    yield slow
    slow.released.set()


@pytest.fixture
def here(text_base: BaseModel, tmp_path: Path, disk: SlowDisk) -> Here:
    """Two models after a step, the first of which is being saved."""
    made = Here({"tiny": text_base}, tmp_path)
    for model in "ab":
        made.create(model)
        made.forward(model, 1, [4])
        made.optim(model, 2)
    made.settle()
    made.save("a", 3, "kept")
    made.until(disk.reached.is_set)
    return made


def test_another_client_trains_while_a_save_is_written(here: Here, disk: SlowDisk) -> None:
    here.forward("b", 3, [5])
    here.optim("b", 4)
    here.create("c")
    here.until(lambda: {"s:train:b/4", "s:train:c/0"} <= set(here.told))
    assert [here.error("b", 3), here.error("b", 4), here.error("c", 0)] == [None] * 3
    assert here.store.status("s:train:a/3") == "queued"
    disk.released.set()
    here.settle()
    assert here.error("a", 3) is None


def test_the_engine_is_told_of_the_copy_before_the_files_are_written(here: Here, disk: SlowDisk) -> None:
    """So the model that is saved goes on too (`tests/engine/test_saves.py`)."""
    here.optim("a", 4)
    here.until(lambda: "s:train:a/4" in here.told)
    assert here.store.status("s:train:a/3") == "queued"
    disk.released.set()
    here.settle()
    assert here.told[-2:] == ["s:train:a/4", "s:train:a/3"]


def test_what_is_written_is_the_state_at_the_copy(here: Here, disk: SlowDisk) -> None:
    backend = here.backend()
    before = [tensor.clone() for tensor in backend.optimizers["s:train:a"].weights.tensors()]
    for tensor in backend.optimizers["s:train:a"].weights.tensors():
        tensor.add_(1.0)
    disk.released.set()
    here.settle()
    directory = here.worker.models.files.shown(here.store.require_checkpoint("tinker://s:train:a/weights/kept").directory)
    backend.restore("again", read_state(Path(directory), backend.base, optimizer=True))
    after = backend.optimizers["again"].weights.tensors()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
