"""What is deleted by itself, what on request, and what is left alone.

Invariant: Files go with their last row, are never forgotten, and nothing that is in use is swept, on a disk or in an
object store. Also: `tests/acceptance/test_object_store.py`.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.preloaded import REAL_PYTHON
from tests.store.test_files import write
from tests.store.test_store import DESCRIPTION, checkpoint
from tinsmith.errors import NotFoundError
from tinsmith.store.catalog import (
    copy_checkpoint,
    delete_checkpoint,
    list_run_checkpoints,
    publish_checkpoint,
    restore_checkpoint,
    set_checkpoint_ttl,
)
from tinsmith.store.files import WRITING_S, CheckpointFiles
from tinsmith.store.store import Store, find_garbage, find_unknown, sweep

CRASH = """
import os, signal, sys
from pathlib import Path
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store
files = CheckpointFiles(Path(sys.argv[1]))
place = files.new_place()
Store.open(Path(sys.argv[1])).announce_checkpoint(place)
with files.written(place) as directory:
    (directory / "weights").write_bytes(b"01234")
    print(place, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A save that the process does not survive."""


@pytest.fixture
def files(tmp_path: Path) -> CheckpointFiles:
    return CheckpointFiles(tmp_path)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets a day pass."""
    return lambda: monkeypatch.setattr("time.time", lambda now=time.time: now() + WRITING_S + 1)


def saved(store: Store, files: CheckpointFiles, path: str, expires_at: float | None = None) -> str:
    """A checkpoint with files; returns their place."""
    place = write(files)
    store.announce_checkpoint(place)
    store.put_checkpoint(checkpoint(path, expires_at, place))
    return place


def found(store: Store, files: CheckpointFiles) -> list[tuple[str, str, int]]:
    """What could be deleted."""
    return [(garbage.what, garbage.reason, garbage.size_bytes) for garbage in find_garbage(store, files)]


def test_what_is_in_use_is_left_alone(store: Store, files: CheckpointFiles, later: Callable[[], None]) -> None:
    kept = saved(store, files, "tinker://m/weights/a")
    sent = saved(store, files, "tinker://m/weights/b", time.time() + 10 * WRITING_S)
    later()
    begun = files.new_place()
    store.announce_checkpoint(begun)
    with files.written(begun) as directory:
        assert found(store, files) == []
        sweep(store, files, unknown=True)
        assert directory.exists()
    assert [bool(files.at(place).sizes()) for place in (kept, sent)] == [True, True]


def test_expired_checkpoints_go_with_their_files_and_deleted_ones_a_day_later(
    store: Store, files: CheckpointFiles, later: Callable[[], None]
) -> None:
    expired = saved(store, files, "tinker://m/weights/expired", time.time() - 1)
    deleted = saved(store, files, "tinker://m/weights/deleted")
    kept = saved(store, files, "tinker://m/weights/kept")
    delete_checkpoint(store, "tinker://m/weights/deleted")
    assert found(store, files) == [("tinker://m/weights/expired", "has expired", 10)]
    sweep(store, files)
    assert [files.at(place).sizes() for place in (expired, deleted)] == [{}, {"a": 10, "b": 0}]
    later()
    assert found(store, files) == [("tinker://m/weights/deleted", "was deleted", 10)]
    for _ in range(2):
        sweep(store, files)
        assert [files.at(place).sizes() for place in (expired, deleted, kept)] == [{}, {}, {"a": 10, "b": 0}]
        assert found(store, files) == []


def test_a_deleted_checkpoint_cannot_be_restored_after_it_has_expired(store: Store, files: CheckpointFiles) -> None:
    path, expires_at = "tinker://m/weights/a", time.time() + 3600
    saved(store, files, path, expires_at)
    delete_checkpoint(store, path)
    until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(expires_at))
    with pytest.raises(NotFoundError, match=f"until {until} UTC `tinsmith checkpoints restore"):
        store.require_checkpoint(path)


def test_the_newest_checkpoints_of_a_run_and_kind_stay_and_published_ones(store: Store, files: CheckpointFiles) -> None:
    for name in ("public", "first", "second", "third"):
        for path in (f"tinker://m/weights/{name}", f"tinker://other/weights/{name}"):
            row = checkpoint(path, directory=write(files))
            store.put_checkpoint(replace(row, created_at=time.time()), kept=2 if "//m/" in path else None)
            if name == "public":
                publish_checkpoint(store, path, public=True)
    store.put_checkpoint(checkpoint("tinker://m/sampler_weights/a", directory=write(files)), kept=2)
    living = [each.tinker_path for each in list_run_checkpoints(store, "m")]
    assert living == [*(f"tinker://m/weights/{name}" for name in ("third", "second", "public")), living[-1]]
    assert living[-1] == "tinker://m/sampler_weights/a"
    assert len(list_run_checkpoints(store, "other")) == 4
    sweep(store, files)
    restore_checkpoint(store, "tinker://m/weights/first")
    assert files.at(store.require_checkpoint("tinker://m/weights/first").directory).sizes()


def test_files_that_a_living_copy_has_free_nothing(store: Store, files: CheckpointFiles) -> None:
    store.create_session("s", DESCRIPTION)
    place = saved(store, files, "tinker://m/weights/a")
    copy = copy_checkpoint(store, "tinker://m/weights/a", "s", 0, None)
    set_checkpoint_ttl(store, "tinker://m/weights/a", -1)
    assert found(store, files) == [("tinker://m/weights/a", "has expired", 0)]
    sweep(store, files, unknown=True)
    assert files.at(place).sizes() == {"a": 10, "b": 0}
    original = replace(store.require_checkpoint(copy), tinker_path="tinker://m/weights/a", expires_at=1.0)
    set_checkpoint_ttl(store, copy, -1)
    store.put_checkpoint(original)
    assert [size for _, _, size in found(store, files)] == [10, 0]


def test_what_a_crash_left_of_a_save_goes_after_a_day(
    store: Store, files: CheckpointFiles, tmp_path: Path, later: Callable[[], None]
) -> None:
    """Beside complete checkpoints, also what workers wrote together, and scratch."""
    kept = saved(store, files, "tinker://m/weights/a")
    done = subprocess.run([REAL_PYTHON, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    place = done.stdout.strip()
    (cut_off,) = (tmp_path / "checkpoints").glob(f".writing-{place}-*")
    joint, scratch = files.joint(kept), tmp_path / "checkpoints" / ".writing-abcdefgh"
    for directory in (joint, scratch):
        directory.mkdir()
        (directory / "weights").write_bytes(b"012")
    assert found(store, files) == []
    sweep(store, files, unknown=True)
    assert [directory.exists() for directory in (cut_off, joint, scratch)] == [True] * 3
    later()
    garbage = found(store, files)
    assert (f"files of {place}", "no checkpoint has them any more", 5) in garbage
    assert ("files of .writing-abcdefgh", "they were never finished", 3) in garbage
    sweep(store, files)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [kept]
    assert files.at(kept).sizes() == {"a": 10, "b": 0}
    assert found(store, files) == []


def test_files_that_the_database_does_not_know_go_on_request_only(
    store: Store, files: CheckpointFiles, tmp_path: Path
) -> None:
    orphan = write(files)
    for foreign in ("notes", ".hidden"):
        (tmp_path / "checkpoints" / foreign).mkdir()
    elsewhere = CheckpointFiles(tmp_path, str(tmp_path / "checkpoints"))  # the same directory, under another name
    kept = saved(store, elsewhere, "tinker://m/weights/a")
    assert found(store, files) == []
    (unknown,) = find_unknown(store, files)
    assert (unknown.what, unknown.reason, unknown.size_bytes) == (
        f"files of {orphan}",
        "the database does not know them",
        10,
    )
    sweep(store, files)
    assert files.at(orphan).sizes() == {"a": 10, "b": 0}
    sweep(store, files, unknown=True)
    assert files.at(orphan).sizes() == {}
    assert files.at(kept).sizes() == {"a": 10, "b": 0}
    assert all((tmp_path / "checkpoints" / foreign).exists() for foreign in ("notes", ".hidden"))
