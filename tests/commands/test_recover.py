"""`tinsmith recover`: checkpoints whose rows are gone come back, whole ones only."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.running import tinsmith_here
from tests.store.test_files import write
from tests.store.test_store import checkpoint
from tinsmith.store.catalog import delete_checkpoint, every_checkpoint
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import write_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")


def saved(files: CheckpointFiles, path: str, created_at: float = 1.0, expires_at: float | None = None) -> Checkpoint:
    """The files of a checkpoint, without a row."""
    place = files.new_place()
    row = checkpoint(path, expires_at, place)
    row = Checkpoint(**vars(row) | {"created_at": created_at})
    with files.written(place) as directory:
        (directory / "adapter.safetensors").write_bytes(b"0123456789")
        write_manifest(directory, row)
    return row


def printed(command: str, data_dir: Path, *more: str) -> list[str]:
    """The lines that a command prints that does what it should."""
    done = tinsmith_here(command, *more, "--data-dir", str(data_dir))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


A = "tinker://m/weights/a"


def test_what_the_database_does_not_know_is_registered_as_it_was_and_the_newest_of_one_path(tmp_path: Path) -> None:
    store, files = Store.open(tmp_path), CheckpointFiles(tmp_path)
    old, new = saved(files, A, 1.0), saved(files, A, 2.0)
    other = saved(files, "tinker://m/sampler_weights/b", 1.5, time.time() + 1000)
    known = saved(files, "tinker://m/weights/known")
    store.put_checkpoint(known)
    already = f"the database already has a checkpoint {A}, with files in {files.shown(new.directory)}"
    not_added = f"not added: {files.shown(old.directory)}: {already}"
    assert printed("recover", tmp_path) == [
        f"added {A}",
        f"added {other.tinker_path}",
        not_added,
        "2 checkpoints added",
    ]
    assert {row.tinker_path: row for row in every_checkpoint(store)} == {
        row.tinker_path: row for row in (new, other, known)
    }
    assert printed("recover", tmp_path) == [not_added, "0 checkpoints added"]


def test_a_database_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    data = tmp_path / "data"  # whose database is a file
    Store.open(data).close()
    row = saved(CheckpointFiles(data), A)
    (data / "tinsmith.db").write_bytes(os.urandom(5000))
    done = tinsmith_here("recover", "--data-dir", str(data))
    assert done.returncode == 2
    assert "tinsmith.db is damaged: file is not a database. Put back a copy" in done.stderr
    assert f"run `tinsmith recover --data-dir {data}`, which registers the checkpoints again" in done.stderr
    for file in data.glob("tinsmith.db*"):
        file.unlink()
    assert printed("recover", data) == [f"added {A}", "1 checkpoints added"]
    assert Store.open(data).require_checkpoint(A) == row


def test_what_replaced_a_checkpoint_after_the_database_was_copied_takes_its_place(tmp_path: Path) -> None:
    store, files = Store.open(tmp_path), CheckpointFiles(tmp_path)
    old = saved(files, A, 1.0)
    store.put_checkpoint(old)
    files.remove(old.directory)
    new = saved(files, A, 2.0)
    assert printed("recover", tmp_path) == [f"added {A}", "1 checkpoints added"]
    assert every_checkpoint(store) == [new]


def test_what_is_damaged_nameless_expired_deleted_or_being_written_is_not_registered(tmp_path: Path) -> None:
    store, files = Store.open(tmp_path), CheckpointFiles(tmp_path)
    damaged, expired = saved(files, A), saved(files, "tinker://m/weights/b", expires_at=time.time() - 1)
    os.truncate(Path(files.shown(damaged.directory)) / "adapter.safetensors", 5)
    nameless = write(files)
    store.put_checkpoint(saved(files, "tinker://m/weights/c"))
    delete_checkpoint(store, "tinker://m/weights/c")
    store.announce_checkpoint(saved(files, "tinker://m/weights/d").directory)
    shown = files.shown(damaged.directory)
    lines = printed("recover", tmp_path)
    assert lines.pop() == "0 checkpoints added"
    assert {line.partition("; ")[0] for line in lines} == {
        f"not added: {shown}: {shown}/adapter.safetensors is damaged: it has 5 bytes, and 10 were written",
        f"not added: {files.shown(nameless)}: {files.shown(nameless)}/manifest.json is missing",
        f"not added: {files.shown(expired.directory)}: tinker://m/weights/b has expired",
    }
    assert [row for row in every_checkpoint(store) if row.deleted_at is None] == []


@pytest.mark.parametrize("root", ["{directory}/elsewhere", "memory://{directory.name}/x"])
def test_a_root_of_ones_own_is_looked_through_on_request(
    database: Callable[[Path], object], tmp_path: Path, root: str
) -> None:
    root, data = root.format(directory=tmp_path), tmp_path / "data"
    database(data)
    row = saved(CheckpointFiles(data, root), A)
    assert printed("recover", data) == ["0 checkpoints added"]
    assert printed("recover", data, "--checkpoint-root", root) == [f"added {A}", "1 checkpoints added"]
    assert Store.open(data).require_checkpoint(A) == row
