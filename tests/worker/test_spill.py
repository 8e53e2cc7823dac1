"""Snapshots on their way to the disk: never gone, whatever the disk does."""

import contextlib
from pathlib import Path

import pytest

from tests.bases import random_adapter
from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.training.checkpoint import About
from tinsmith.worker.spill import Key, Spill, Written

ONE, TWO = ("tiny", "m/1"), ("tiny", "m/2")


def put(spill: Spill, key: Key, base: BaseModel) -> Adapter:
    adapter = random_adapter(base)
    spill.put(key, About.of(base, adapter.shape), adapter)
    return adapter


def test_a_snapshot_is_in_memory_until_it_is_on_the_disk(text_base: BaseModel, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill")
    assert spill.find(ONE) is None
    adapter = put(spill, ONE, text_base)
    found = spill.find(ONE)
    assert found is adapter or isinstance(found, Written)
    spill.settle()
    found = spill.find(ONE)
    assert isinstance(found, Written)
    assert found.ref == adapter.ref
    assert [found.directory] == list((tmp_path / "spill").iterdir())
    put(spill, TWO, text_base)
    assert sorted(spill.keys()) == [ONE, TWO]


def test_what_is_dropped_on_its_way_leaves_nothing(text_base: BaseModel, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill")
    put(spill, ONE, text_base)
    spill.drop(ONE)
    spill.drop(TWO)
    assert (spill.find(ONE), spill.keys(), list((tmp_path / "spill").iterdir())) == (None, [], [])


def test_what_the_disk_does_not_take_stays_in_memory_and_is_tried_again(text_base: BaseModel, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill")
    (tmp_path / "spill").rmdir()
    (tmp_path / "spill").touch()  # no directory: nothing can be written
    adapter = put(spill, ONE, text_base)
    with pytest.raises(TinsmithError, match="make room there"):
        put(spill, TWO, text_base)
    assert spill.find(ONE) is adapter
    assert spill.find(TWO) is None
    with pytest.raises(TinsmithError):
        spill.settle()
    (tmp_path / "spill").unlink()
    (tmp_path / "spill").mkdir()
    with contextlib.suppress(TinsmithError):
        spill.settle()  # the attempt before, which began without a directory or has already found one
    spill.settle()
    assert isinstance(spill.find(ONE), Written)


def test_what_failed_for_another_reason_is_tried_again_too(text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no snapshot could be taken any more: each would fail with the error of this one."""

    def run_out(*_: object) -> None:
        raise MemoryError

    spill = Spill(tmp_path / "spill")
    with monkeypatch.context() as patched:
        patched.setattr("tinsmith.worker.spill.write_state", run_out)
        adapter = put(spill, ONE, text_base)
        spill._thread.submit(lambda: None).result()  # it has been tried by now
    with pytest.raises(MemoryError):
        put(spill, TWO, text_base)
    found = spill.find(ONE)
    assert found is adapter or isinstance(found, Written)
    put(spill, TWO, text_base)
    spill.settle()
    assert all(isinstance(spill.find(key), Written) for key in (ONE, TWO))


def test_dropping_what_the_disk_did_not_take_ends_the_error(text_base: BaseModel, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "spill")
    (tmp_path / "spill").rmdir()
    (tmp_path / "spill").touch()
    put(spill, ONE, text_base)
    spill.drop(ONE)
    assert spill.find(ONE) is None
    spill.settle()
