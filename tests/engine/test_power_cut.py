"""What was acknowledged is there after a power cut, and what was deleted does not come back without its files."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import Checkpoints
from tests.store.power_cut import Disk, recorded
from tests.training.test_checkpoint import advance
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.catalog import delete_checkpoint, set_checkpoint_ttl
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import read_state
from tinsmith.wire.paths import CheckpointPath

TRAINING = CheckpointPath("m", "training", "a")


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Knows what was synced."""
    with recorded() as disk:
        yield disk


@pytest.fixture
def backend(text_base: BaseModel) -> LocalBackend:
    """A backend with a model "m" after a step."""
    backend = LocalBackend(text_base, TrainingConfig())
    backend.create_model("m", LoraShape(4, seed=1))
    advance(backend, "m", 0)
    return backend


def after_cut(disk: Disk, directory: Path, name: str) -> Checkpoints:
    """The checkpoints that a server finds after the power failed now."""
    disk.cut(directory, directory.parent / name)
    return Checkpoints(directory.parent / name / "deep" / "data")


@pytest.mark.parametrize("root", ["", "elsewhere/checkpoints"])
def test_a_checkpoint_that_was_acknowledged_survives(disk: Disk, backend: LocalBackend, tmp_path: Path, root: str) -> None:
    (tmp_path / "disk").mkdir()
    root = root and str(tmp_path / "disk" / root)
    checkpoints = Checkpoints(tmp_path / "disk" / "deep" / "data", root)
    path = checkpoints.save(TRAINING, backend)
    disk.cut(tmp_path / "disk", tmp_path / "left")
    (tmp_path / "disk").rename(tmp_path / "before")
    (tmp_path / "left").rename(tmp_path / "disk")  # so that places outside of the data directory are found
    again = Checkpoints(tmp_path / "disk" / "deep" / "data", root)
    with again.opened(path, "training", optimizer=True) as (_, directory):
        backend.restore("n", read_state(directory, backend.base, optimizer=True))
    one, other = (backend.optimizers[name].weights.tensors() for name in "mn")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_was_deleted_or_replaced_has_no_row_by_the_time_its_files_may_go(disk: Disk, backend: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    checkpoints = Checkpoints(tmp_path / "disk" / "deep" / "data")
    path = checkpoints.save(TRAINING, backend)
    delete_checkpoint(checkpoints.store, path)
    assert after_cut(disk, tmp_path / "disk", "deleted").store.checkpoint(path) is None

    checkpoints.save(TRAINING, backend)
    checkpoints.save(TRAINING, backend, overwrite=True)
    replaced = checkpoints.store.discarded_directories()
    assert after_cut(disk, tmp_path / "disk", "replaced").store.require_checkpoint(path).directory not in replaced

    set_checkpoint_ttl(checkpoints.store, path, -1)
    assert [gone.tinker_path for gone in checkpoints.store.drop_expired_checkpoints()] == [path]
    assert after_cut(disk, tmp_path / "disk", "expired").store.expired_checkpoints() == []
