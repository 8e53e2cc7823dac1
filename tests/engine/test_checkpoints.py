"""Checkpoints of a data directory: what replaces what, and what is deleted when.

Invariant: An acknowledged checkpoint survives a power cut; a deleted one does not come back without its files.

Invariant: A checkpoint never loads onto other weights of its base model, and no changed byte of its files loads.
Also: `tests/models/test_fingerprint.py`, `tests/acceptance/test_exchange.py`.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bases import load as load_base
from tests.checkpoints import Checkpoints, find
from tests.store.power_cut import Disk, recorded
from tests.training.test_checkpoint import advance
from tinsmith.config import TrainingConfig
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import LoraShape
from tinsmith.store.catalog import delete_checkpoint, set_checkpoint_ttl
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import read_about, read_state
from tinsmith.wire.paths import CheckpointPath
from tinsmith.worker.snapshots import Snapshots

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
    return Checkpoints(tmp_path)


@pytest.fixture
def snapshots(checkpoints: Checkpoints, text_base: BaseModel, tmp_path: Path) -> Snapshots:
    return snapshots_of(checkpoints, text_base, tmp_path)


def snapshots_of(checkpoints: Checkpoints, base: BaseModel, directory: Path) -> Snapshots:
    return Snapshots({"tiny": base}, checkpoints.store, checkpoints.files, directory / "snapshots", 2**30)


def test_an_expired_checkpoint_is_refused_at_once_and_a_deleted_one_when_it_is_forgotten(
    backend: LocalBackend, checkpoints: Checkpoints, snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then it is sampled from memory."""
    path = checkpoints.save(SAMPLER, backend)
    find(snapshots, path)
    delete_checkpoint(checkpoints.store, path)
    find(snapshots, path)
    snapshots.forget(path)
    with pytest.raises(NotFoundError, match="does not exist"):
        find(snapshots, path)
    checkpoints.save(SAMPLER, backend, ttl_seconds=3600)
    find(snapshots, path)
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    for _ in range(2):
        with pytest.raises(NotFoundError, match="expired"):
            find(snapshots, path)
    with pytest.raises(NotFoundError, match="it expired at"), checkpoints.opened(path, "sampler"):
        pass


def test_a_checkpoint_whose_files_go_while_it_is_read_is_not_found(
    backend: LocalBackend, checkpoints: Checkpoints
) -> None:
    """Its row goes before its files, which a worker may be reading."""
    path = checkpoints.save(TRAINING, backend)

    def read() -> None:
        with checkpoints.opened(path, "training") as (found, directory):
            checkpoints.files.remove(found.directory)
            read_about(directory)

    with pytest.raises(NotFoundError, match="it was deleted while it was read"):
        read()
    checkpoints.rows.check_still_there(path)
    delete_checkpoint(checkpoints.store, path)
    with pytest.raises(NotFoundError, match="does not exist"):
        checkpoints.rows.check_still_there(path)


def place(checkpoints: Checkpoints, path: str) -> Path:
    """Where the files of a checkpoint lie."""
    return Path(checkpoints.files.shown(checkpoints.store.require_checkpoint(path).directory))


def load(backend: LocalBackend, checkpoints: Checkpoints, path: str, optimizer: bool = True) -> None:
    """Train on from a checkpoint, as the model "n"."""
    with checkpoints.opened(path, "training", optimizer) as (_, directory):
        backend.restore("n", read_state(directory, backend.base, optimizer))


@pytest.mark.parametrize("file", ["adapter.safetensors", "optimizer.safetensors", "checkpoint.json", "manifest.json"])
def test_what_is_damaged_cut_or_missing_is_refused_by_file_and_remedy(
    backend: LocalBackend, checkpoints: Checkpoints, file: str
) -> None:
    """A damaged optimizer keeps nobody from the weights."""
    advance(backend, "m", 0)
    path = checkpoints.save(TRAINING, backend)
    damaged = place(checkpoints, path) / file
    right = damaged.read_bytes()

    def refused(why: str) -> None:
        with pytest.raises(TinsmithError, match=rf"{damaged} is {why}"):
            load(backend, checkpoints, path)
        if file == "optimizer.safetensors":
            load(backend, checkpoints, path, optimizer=False)

    for position in (len(right) // 2, len(right) - 3):
        damaged.write_bytes(right[:position] + bytes([right[position] ^ 1]) + right[position + 1 :])
        refused("damaged: .*; put back a copy of it .*, or use another checkpoint")
    if file != "manifest.json":
        for left in (100, 0):
            damaged.write_bytes(right[:left])
            refused(f"damaged: it has {left} bytes, and {len(right):,} were written")
    damaged.unlink()
    refused("missing; put back a copy")
    damaged.write_bytes(right)
    load(backend, checkpoints, path)


@pytest.fixture
def other_base(family_dir: Callable[[str], Path], tmp_path: Path) -> BaseModel:
    """The base model of another training run: the same name and sizes, one weight of many moved a little."""
    directory = shutil.copytree(family_dir("qwen3"), tmp_path / "other")
    tensors = load_file(directory / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 0.01
    save_file(tensors, directory / "model.safetensors")
    return load_base(directory)


def test_other_weights_of_the_base_are_refused_to_train_and_to_sample(
    backend: LocalBackend, checkpoints: Checkpoints, other_base: BaseModel, tmp_path: Path
) -> None:
    trained_on, here = backend.base.fingerprint[:16], other_base.fingerprint[:16]
    refusal = (
        f"on other weights of the base model than tiny has here: base fingerprint {trained_on}, here {here}; "
        "use the base model that"
    )
    other = LocalBackend(other_base, TrainingConfig())
    with pytest.raises(UserError, match=refusal):
        load(other, checkpoints, checkpoints.save(TRAINING, backend))
    assert other.optimizers == {}
    snapshots = snapshots_of(checkpoints, other_base, tmp_path)
    with pytest.raises(UserError, match=refusal):
        find(snapshots, checkpoints.save(SAMPLER, backend))


# ---- What was acknowledged is there after a power cut, and what was deleted does not come back without its files


@pytest.fixture
def disk() -> Iterator[Disk]:
    """Knows what was synced."""
    with recorded() as disk:
        yield disk


def after_cut(disk: Disk, directory: Path, name: str) -> Checkpoints:
    """The checkpoints that a server finds after the power failed now."""
    disk.cut(directory, directory.parent / name)
    return Checkpoints(directory.parent / name / "deep" / "data")


@pytest.mark.parametrize("root", ["", "elsewhere/checkpoints"])
def test_a_checkpoint_that_was_acknowledged_survives(
    disk: Disk, backend: LocalBackend, tmp_path: Path, root: str
) -> None:
    (tmp_path / "disk").mkdir()
    root = root and str(tmp_path / "disk" / root)
    checkpoints = Checkpoints(tmp_path / "disk" / "deep" / "data", root)
    advance(backend, "m", 0)
    path = checkpoints.save(TRAINING, backend)
    disk.cut(tmp_path / "disk", tmp_path / "left")
    (tmp_path / "disk").rename(tmp_path / "before")
    (tmp_path / "left").rename(tmp_path / "disk")  # so that places outside of the data directory are found
    again = Checkpoints(tmp_path / "disk" / "deep" / "data", root)
    load(backend, again, path)
    one, other = (backend.optimizers[name].weights.tensors() for name in "mn")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_was_deleted_or_replaced_has_no_row_by_the_time_its_files_may_go(
    disk: Disk, backend: LocalBackend, tmp_path: Path
) -> None:
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
    assert [gone.tinker_path for gone in checkpoints.store.drop_gone_checkpoints()] == [path]
    assert after_cut(disk, tmp_path / "disk", "expired").store.gone_checkpoints() == []
