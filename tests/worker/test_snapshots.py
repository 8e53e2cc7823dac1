"""Frozen weights in memory and on disk.

Invariant: Two hundred steps' snapshots stay under the cap; the newest, what is being sampled and what is sampled now
and then stay.

Invariant: Snapshots that do not fit into memory come back from disk unchanged.

Invariant: A sample uses the newest weights although older ones are being read from disk.
"""

import contextlib
import gc
import shutil
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.bases import random_adapter
from tests.checkpoints import Checkpoints, find
from tests.extent import amount
from tests.worker.test_background import delivered
from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store
from tinsmith.training.checkpoint import About, SavedState, write_state
from tinsmith.wire.paths import CheckpointPath
from tinsmith.worker.background import Background
from tinsmith.worker.snapshots import Snapshots
from tinsmith.worker.spill import Key, Spill, Written


def make(base: BaseModel, data_dir: Path, limit_bytes: float = 0) -> Snapshots:
    return Snapshots(
        {"tiny": base}, Store.open(data_dir), CheckpointFiles(data_dir), data_dir / "snapshots", limit_bytes
    )


@pytest.fixture
def snapshots(text_base: BaseModel, tmp_path: Path) -> Snapshots:
    """Of which only the newest is kept in memory."""
    return make(text_base, tmp_path)


def files(data_dir: Path, snapshots: Snapshots) -> int:
    """How many snapshots are on the disk, when all that are on their way have arrived."""
    snapshots.spill.settle()
    return len(list((data_dir / "snapshots").iterdir()))


def equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def test_the_snapshots_of_one_model_are_withdrawn(snapshots: Snapshots, text_base: BaseModel, tmp_path: Path) -> None:
    for snapshot_id in ("s:train:1/2", "s:train:1/5", "s:train:10/2"):
        snapshots.publish("tiny", snapshot_id, random_adapter(text_base))
    assert files(tmp_path, snapshots) == 2
    snapshots.withdraw("s:train:1")
    assert (files(tmp_path, snapshots), list(snapshots.held)) == (0, [("tiny", "s:train:10/2")])
    with pytest.raises(NotFoundError, match="gone"):
        find(snapshots, "s:train:1/2")


def test_the_least_recently_sampled_go_to_disk_and_come_back(text_base: BaseModel, tmp_path: Path) -> None:
    adapters = {f"m/{n}": random_adapter(text_base, seed=n) for n in range(3)}
    snapshots = make(text_base, tmp_path, limit_bytes=2.5 * adapters["m/0"].nbytes)
    snapshots.publish("tiny", "m/0", adapters["m/0"])
    snapshots.publish("tiny", "m/1", adapters["m/1"])
    assert find(snapshots, "m/0") is adapters["m/0"]
    snapshots.publish("tiny", "m/2", adapters["m/2"])
    assert [key[1] for key in snapshots.held] == ["m/0", "m/2"]
    for snapshot_id, adapter in adapters.items():
        for _ in range(2):
            assert equal(find(snapshots, snapshot_id), adapter)
        assert len(snapshots.held) == 2
    assert files(tmp_path, snapshots) == 3


def test_inflight_weights_take_the_place_of_former_ones_also_of_those_on_disk(
    snapshots: Snapshots, text_base: BaseModel, tmp_path: Path
) -> None:
    former, old, new = (random_adapter(text_base, seed=seed) for seed in range(3))
    seen: list[object] = []
    snapshots.watchers.append(lambda *published: seen.append(published))
    for weights in (former, old):
        snapshots.publish("tiny", "m/inflight", weights)
        assert snapshots.find("tiny", "m/inflight") is weights
    assert seen == [("tiny", former), ("tiny", old)]
    snapshots.publish("tiny", "other/1", random_adapter(text_base))  # puts the old ones on disk
    assert files(tmp_path, snapshots) == 1
    snapshots.publish("tiny", "m/inflight", new)
    snapshots.publish("tiny", "other/2", random_adapter(text_base))
    snapshots.spill.settle()
    again = find(snapshots, "m/inflight")
    assert again is not new
    assert (equal(again, new), again.ref) == (True, new.ref)


def on_disk(data_dir: Path, snapshots: Snapshots) -> int:
    """Bytes of all snapshots on the disk, when all that are on their way have arrived."""
    snapshots.spill.settle()
    return sum(file.stat().st_size for file in (data_dir / "snapshots").rglob("*") if file.is_file())


def test_two_hundred_steps_stay_under_the_cap_and_keep_what_is_sampled(
    snapshots: Snapshots, text_base: BaseModel, tmp_path: Path
) -> None:
    first = random_adapter(text_base, seed=1)
    snapshots.publish("tiny", "reference/0", first)
    snapshots.publish("tiny", "m/0", random_adapter(text_base, seed=2))
    size = on_disk(tmp_path, snapshots)  # of the first, which the second has put there
    snapshots.disk_bytes = 5 * size
    snapshots.in_use = lambda: [("tiny", "m/0")]  # by one long sample
    steps = amount(40, 200)
    for step in range(1, steps + 1):
        snapshots.publish("tiny", f"m/{step}", random_adapter(text_base, seed=3))
        assert on_disk(tmp_path, snapshots) <= 6 * size  # the sixth was on its way when the newest came
        if step % 2:
            assert equal(find(snapshots, "reference/0"), first)
    kept = {key[1] for key in snapshots.sampled_at}
    assert {"reference/0", "m/0", f"m/{steps}"} <= kept
    assert len(kept) <= 8
    why = (
        r"m/5 are gone: they were sampled least recently of snapshots that take more disk than .* GiB "
        r"\(--snapshot-disk-gib\); weights"
    )
    with pytest.raises(NotFoundError, match=why):
        find(snapshots, "m/5")
    for snapshot_id in kept:
        find(snapshots, snapshot_id)
    snapshots.withdraw("m")
    assert (snapshots.dropped, list(snapshots.sampled_at)) == ({}, [("tiny", "reference/0")])


def test_the_newest_of_each_model_is_kept_without_any_room(snapshots: Snapshots, text_base: BaseModel) -> None:
    snapshots.disk_bytes = 0
    for snapshot_id in ("m/1", "n/1", "m/2", "n/2", "m/inflight"):
        snapshots.publish("tiny", snapshot_id, random_adapter(text_base))
    snapshots.spill.settle()
    for snapshot_id in ("m/2", "n/2", "m/inflight"):
        find(snapshots, snapshot_id)
    assert sorted(key[1] for key in snapshots.dropped) == ["m/1", "n/1"]


def test_what_nobody_samples_is_dropped_after_a_while(
    snapshots: Snapshots, text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0
    monkeypatch.setattr("time.monotonic", lambda now=time.monotonic: now() + passed)
    snapshots.idle_s = 2 * 3600
    for number in range(4):
        snapshots.publish("tiny", f"m/{number}", random_adapter(text_base))
    snapshots.in_use = lambda: [("tiny", "m/1")]
    passed = 3600
    find(snapshots, "m/0")
    snapshots.drop_idle()
    assert snapshots.dropped == {}
    passed += 3601
    snapshots.drop_idle()
    assert list(snapshots.dropped) == [("tiny", "m/2")]  # 0 was sampled, 1 is being sampled, 3 is the newest
    why = (
        r"m/2 are gone: nobody had sampled them for 2 hours \(--snapshot-idle-h\); "
        r"weights that are saved under a name are kept"
    )
    with pytest.raises(NotFoundError, match=why):
        find(snapshots, "m/2")
    assert sorted(key[1] for key in snapshots.sampled_at) == ["m/0", "m/1", "m/3"]
    assert files(tmp_path, snapshots) == 3
    snapshots.in_use = tuple
    passed += 3601
    snapshots.drop_idle()
    # The time of 1 counts from the end of its sample
    assert list(snapshots.dropped) == [("tiny", "m/2"), ("tiny", "m/0")]


def test_the_worker_after_one_that_died_has_its_adapters_and_the_newest_inflight_weights(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """Not what the other was still writing, and not what it had replaced or withdrawn before it was written."""
    threads = Background("copies", 1, lambda: None)
    dead, adapters = make(text_base, tmp_path, limit_bytes=1e9), [random_adapter(text_base, seed=n) for n in range(5)]
    for snapshot_id, weights in zip(("m/0", "m/inflight", "m/inflight", "m/3", "n/0"), adapters, strict=True):
        dead.publish("tiny", snapshot_id, weights)
        dead.replicate(threads, "tiny", snapshot_id, weights)
    dead.withdraw("n")
    delivered(threads)
    (tmp_path / "snapshots" / ".writing-more").mkdir()
    snapshots = make(text_base, tmp_path, limit_bytes=1e9)
    assert files(tmp_path, snapshots) == 3
    assert snapshots.newest == {("tiny", "m"): ("tiny", "m/3")}
    for snapshot_id, weights in (("m/0", adapters[0]), ("m/inflight", adapters[2]), ("m/3", adapters[3])):
        again = find(snapshots, snapshot_id)
        assert (equal(again, weights), again.ref) == (True, weights.ref)
    snapshots.withdraw("m")
    assert files(tmp_path, snapshots) == 0
    threads.close()


def test_files_that_were_deleted_from_outside_are_named_and_end_nothing(
    snapshots: Snapshots, text_base: BaseModel, tmp_path: Path
) -> None:
    for number in range(2):
        snapshots.publish("tiny", f"m/{number}", random_adapter(text_base))
    assert files(tmp_path, snapshots) == 1
    for directory in (tmp_path / "snapshots").iterdir():
        shutil.rmtree(directory)
    with pytest.raises(NotFoundError, match=r"the files of snapshot m/0 were deleted; save the weights again"):
        find(snapshots, "m/0")
    snapshots.withdraw("m")


def saved(base: BaseModel, data_dir: Path, seed: int = 1) -> str:
    """The path of a checkpoint for sampling whose files and row are there."""
    adapter = random_adapter(base, seed=seed)
    state = SavedState(About.of(base, adapter.shape), adapter.named_tensors())
    return (
        Checkpoints(data_dir)
        .add(CheckpointPath("s:train:0", "sampler", "a"), partial(write_state, state), {})
        .tinker_path
    )


@pytest.mark.parametrize("is_read", [True, False])
def test_weights_that_are_published_or_go_while_former_ones_are_read_do_so(
    snapshots: Snapshots, text_base: BaseModel, is_read: bool
) -> None:
    """Also if the former ones could not be read any more because of that."""
    snapshots.publish("tiny", "m/inflight", random_adapter(text_base, seed=1))
    snapshots.publish("tiny", "other/1", random_adapter(text_base))  # puts them on the disk
    snapshots.spill.settle()
    read = snapshots.reader("tiny", "m/inflight")
    former = read()
    new = random_adapter(text_base, seed=2)
    snapshots.publish("tiny", "m/inflight", new)  # deletes the files of the former ones
    with pytest.raises(NotFoundError, match="were deleted"):
        read()
    snapshots.hold(("tiny", "m/inflight"), (lambda: former) if is_read else read)
    assert snapshots.find("tiny", "m/inflight") is new
    snapshots.withdraw("m")
    snapshots.hold(("tiny", "m/inflight"), lambda: former)
    assert ("tiny", "m/inflight") not in snapshots.held
    with pytest.raises(NotFoundError, match="gone"):
        snapshots.reader("tiny", "m/inflight")


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(text_base: BaseModel, tmp_path: Path) -> None:
    snapshots = make(text_base, tmp_path, 2**30)
    path = saved(text_base, tmp_path, seed=1)
    read = snapshots.reader("tiny", path)()
    saved(text_base, tmp_path, seed=2)
    snapshots.forget(path)
    snapshots.hold(("tiny", path), lambda: read)
    assert snapshots.find("tiny", path) is None
    assert equal(find(snapshots, path), random_adapter(text_base, seed=2))


# ---- On their way to the disk: never gone, whatever that does


ONE, TWO = ("tiny", "m/1"), ("tiny", "m/2")


def put(spill: Spill, key: Key, base: BaseModel) -> Adapter:
    adapter = random_adapter(base)
    spill.put(key, About.of(base, adapter.shape), adapter)
    return adapter


def test_what_is_dropped_on_its_way_leaves_nothing(text_base: BaseModel, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill")
    put(spill, ONE, text_base)
    spill.drop(ONE)
    spill.drop(TWO)
    assert (spill.find(ONE), spill.keys(), list((tmp_path / "spill").iterdir())) == (None, [], [])


def test_what_the_disk_does_not_take_stays_in_memory_and_is_tried_again_or_dropped(
    text_base: BaseModel, tmp_path: Path
) -> None:
    spill = Spill(tmp_path / "spill")
    (tmp_path / "spill").rmdir()
    (tmp_path / "spill").touch()  # no directory: nothing can be written
    put(spill, ONE, text_base)
    with pytest.raises(TinsmithError):
        spill.settle()
    spill.drop(ONE)
    spill.settle()  # which ends the error
    adapter = put(spill, ONE, text_base)
    with pytest.raises(TinsmithError, match="make room there"):
        put(spill, TWO, text_base)
    assert (spill.find(ONE), spill.find(TWO)) == (adapter, None)
    (tmp_path / "spill").unlink()
    (tmp_path / "spill").mkdir()
    with contextlib.suppress(TinsmithError):
        spill.settle()  # the attempt before, which began without a directory or has already found one
    spill.settle()
    assert isinstance(spill.find(ONE), Written)


def test_what_failed_for_another_reason_is_tried_again_too(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no snapshot could be taken any more: each would fail with the error of this one."""

    def run_out(*_: object) -> None:
        raise MemoryError

    spill = Spill(tmp_path / "spill")
    with monkeypatch.context() as patched:
        patched.setattr("tinsmith.worker.spill.write_state", run_out)
        put(spill, ONE, text_base)
        spill._thread.submit(lambda: None).result()  # it has been tried by now
    with pytest.raises(MemoryError):
        put(spill, TWO, text_base)
    put(spill, TWO, text_base)
    spill.settle()
    assert all(isinstance(spill.find(key), Written) for key in (ONE, TWO))


def test_weights_that_the_disk_does_not_take_leave_the_memory_with_their_last_user(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and not when somebody looks for garbage: they may be as large as the model."""

    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("tinsmith.worker.spill.write_state", run_out)
    spill = Spill(tmp_path / "spill")
    put(spill, ONE, text_base)
    spill._thread.submit(lambda: None).result()  # it has been tried by now
    gc.collect()
    gc.disable()
    try:
        refused = random_adapter(text_base)
        there = weakref.ref(refused)
        with contextlib.suppress(MemoryError):
            spill.put(TWO, About.of(text_base, refused.shape), refused)
        del refused
        assert there() is None
    finally:
        gc.enable()
