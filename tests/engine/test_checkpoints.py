"""Checkpoints of a data directory: what replaces what, and what is deleted when."""

import os
import time
from pathlib import Path

import pytest

from tinsmith.config import TrainingConfig
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import NotFoundError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import LoraShape
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend
from tinsmith.wire.paths import CheckpointPath

TRAINING = CheckpointPath("m", "training", "a")
SAMPLER = CheckpointPath("m", "sampler", "a")


@pytest.fixture
def backend(text_base: BaseModel) -> LocalBackend:
    """A backend with a model "m"."""
    backend = LocalBackend(text_base, TrainingConfig())
    backend.create_model("m", LoraShape(4, seed=1))
    return backend


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(Store.open(tmp_path), tmp_path / "checkpoints")


def test_the_row_describes_the_files(backend: LocalBackend, checkpoints: Checkpoints) -> None:
    path = checkpoints.save(TRAINING, backend, ttl_seconds=100, user_metadata={"k": "v"})
    found, directory = checkpoints.find(path, "training")
    assert (found.base_model, found.architecture, found.has_optimizer) == ("tiny", "qwen3", True)
    assert (found.lora_config["rank"], found.user_metadata) == (4, {"k": "v"})
    assert found.size_bytes == sum(file.stat().st_size for file in directory.iterdir()) > 4 * 64 * 2
    assert found.expires_at == pytest.approx(found.created_at + 100)
    assert not checkpoints.find(checkpoints.save(SAMPLER, backend), "sampler")[0].has_optimizer


def test_what_is_replaced_is_deleted(backend: LocalBackend, checkpoints: Checkpoints) -> None:
    checkpoints.save(TRAINING, backend)
    with pytest.raises(UserError, match="tinker://m/weights/a exists already"):
        checkpoints.save(TRAINING, backend)
    checkpoints.save(TRAINING, backend, overwrite=True)
    assert [path.name for path in checkpoints.root.iterdir()] == [checkpoints.find(str(TRAINING), "training")[0].directory]


def test_an_expired_checkpoint_is_refused_at_once_and_deleted_later(
    backend: LocalBackend, checkpoints: Checkpoints, text_base: BaseModel, tmp_path: Path
) -> None:
    snapshots = Snapshots({"tiny": text_base}, checkpoints, tmp_path / "snapshots", 2**30)
    path = checkpoints.save(SAMPLER, backend, ttl_seconds=0.5)
    snapshots.find("tiny", path)
    time.sleep(0.6)
    for _ in range(2):
        with pytest.raises(NotFoundError, match="expired"):
            snapshots.find("tiny", path)
    with pytest.raises(NotFoundError, match="has expired"):
        checkpoints.find(path, "sampler")
    assert len(list(checkpoints.root.iterdir())) == 1
    checkpoints.drop_expired()
    assert list(checkpoints.root.iterdir()) == []


def test_what_a_dead_process_left_is_deleted_once_nobody_can_be_writing_it(backend: LocalBackend, checkpoints: Checkpoints) -> None:
    checkpoints.save(TRAINING, backend)
    for name, age_s in (("old", 7200), ("new", 0)):
        directory = checkpoints.root / name
        directory.mkdir()
        os.utime(directory, (time.time() - age_s,) * 2)
    checkpoints.drop_orphans()
    kept = checkpoints.find(str(TRAINING), "training")[0].directory
    assert {path.name for path in checkpoints.root.iterdir()} == {kept, "new"}
