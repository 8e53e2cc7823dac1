"""Checkpoints of a data directory: what replaces what, and what is deleted when."""

import resource
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tinsmith.config import TrainingConfig
from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import LoraShape
from tinsmith.store.catalog import delete_checkpoint, list_run_checkpoints
from tinsmith.store.files import CheckpointFiles, whole_directory
from tinsmith.store.store import Store
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import About, read_about
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
    return Checkpoints(Store.open(tmp_path), CheckpointFiles(tmp_path))


def directories(checkpoints: Checkpoints) -> list[str]:
    """Where the files of its checkpoints lie."""
    return [c.directory for c in list_run_checkpoints(checkpoints.store, "m")]


def test_the_row_describes_the_files(backend: LocalBackend, checkpoints: Checkpoints) -> None:
    path = checkpoints.save(TRAINING, backend, ttl_seconds=100, user_metadata={"k": "v"})
    with checkpoints.opened(path, "training") as (found, directory):
        assert found.size_bytes == sum(file.stat().st_size for file in directory.iterdir()) > 4 * 64 * 2
    assert (found.base_model, found.architecture, found.has_optimizer) == ("tiny", "qwen3", True)
    assert (found.lora_config["rank"], found.user_metadata) == (4, {"k": "v"})
    assert found.expires_at == pytest.approx(found.created_at + 100)
    assert not checkpoints.store.require_checkpoint(checkpoints.save(SAMPLER, backend), "sampler").has_optimizer


def test_what_is_replaced_is_to_be_deleted(backend: LocalBackend, checkpoints: Checkpoints) -> None:
    checkpoints.save(TRAINING, backend)
    first = directories(checkpoints)
    with pytest.raises(UserError, match="tinker://m/weights/a exists already"):
        checkpoints.save(TRAINING, backend)
    checkpoints.save(TRAINING, backend, overwrite=True)
    assert checkpoints.store.discarded_directories() == first
    assert directories(checkpoints) != first


def test_an_expired_checkpoint_is_refused_at_once(
    backend: LocalBackend, checkpoints: Checkpoints, text_base: BaseModel, tmp_path: Path
) -> None:
    snapshots = Snapshots({"tiny": text_base}, checkpoints, tmp_path / "snapshots", 2**30)
    path = checkpoints.save(SAMPLER, backend, ttl_seconds=0.5)
    snapshots.find("tiny", path)
    time.sleep(0.6)
    for _ in range(2):
        with pytest.raises(NotFoundError, match="expired"):
            snapshots.find("tiny", path)
    with pytest.raises(NotFoundError, match="has expired"), checkpoints.opened(path, "sampler"):
        pass


def test_a_deleted_checkpoint_is_sampled_from_memory_until_it_is_forgotten(
    backend: LocalBackend, checkpoints: Checkpoints, text_base: BaseModel, tmp_path: Path
) -> None:
    snapshots = Snapshots({"tiny": text_base}, checkpoints, tmp_path / "snapshots", 2**30)
    path = checkpoints.save(SAMPLER, backend)
    snapshots.find("tiny", path)
    delete_checkpoint(checkpoints.store, path)
    snapshots.find("tiny", path)
    snapshots.forget(path)
    with pytest.raises(NotFoundError, match="was deleted"):
        snapshots.find("tiny", path)


def test_a_checkpoint_whose_files_go_while_it_is_read_is_not_found(backend: LocalBackend, checkpoints: Checkpoints) -> None:
    path = checkpoints.save(TRAINING, backend)

    def read() -> None:
        with checkpoints.opened(path, "training") as (found, directory):
            checkpoints.files.remove(found.directory)
            read_about(directory)

    with pytest.raises(NotFoundError, match="it was deleted while it was read"):
        read()


def test_a_save_that_fails_leaves_nothing(checkpoints: Checkpoints) -> None:
    def write(directory: Path) -> About:
        with whole_directory(directory) as files:
            (files / "half").write_text("x")
            raise TinsmithError("the disk is full")

    with pytest.raises(TinsmithError, match="the disk is full"):
        checkpoints.add(TRAINING, write)
    assert checkpoints.store.checkpoint(str(TRAINING)) is None
    assert checkpoints.store.discarded_directories() == []  # it may be written for a day


def test_a_disk_that_takes_no_more_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(directory: Path) -> About:
        with whole_directory(directory) as files:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
            try:
                save_file({"a": torch.zeros(1000)}, files / "a")
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            raise AssertionError("4000 bytes went into a file of at most 1000")

    with pytest.raises(TinsmithError, match=r"tinker://m/weights/a could not be written: .*File too large"):
        checkpoints.add(TRAINING, write)
    assert list((tmp_path / "checkpoints").iterdir()) == []
