"""`tinsmith backup`: what is copied, and what is said of what cannot be."""

import hashlib
import os
import resource
import shutil
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from tests.commands.test_recover import printed, saved
from tests.databases import PostgreSQL
from tests.running import limited_program, tinsmith_here
from tests.store.test_blobs import DIGEST, IMAGE, blobs_in, with_model
from tests.store.test_commands import MODEL, done, step
from tests.store.test_kept import kept
from tinsmith.commands.backup import back_up
from tinsmith.errors import TinsmithError
from tinsmith.store.catalog import delete_checkpoint, every_checkpoint, purge_checkpoint
from tinsmith.store.database import URL_FILE
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.recorded_sequences import RecordedSequences
from tinsmith.store.records import HistoryChange
from tinsmith.store.store import Store, sweep


def delete_for_good(store: Store, path: str) -> None:
    """Delete a checkpoint that cannot be restored."""
    delete_checkpoint(store, path)
    purge_checkpoint(store, path)
    store.drop_gone_checkpoints()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with checkpoints in it, elsewhere and in an object store, the latter two with copies."""
    directory = tmp_path / "data"
    store = Store.open(directory)
    for number, root in enumerate(("", str(tmp_path / "elsewhere"), f"memory://{tmp_path.name}/x")):
        row = saved(CheckpointFiles(directory, root), f"tinker://m/weights/{number}", created_at=float(number))
        store.put_checkpoint(row)
    (directory / "signing.key").write_bytes(b"k" * 32)
    (directory / "signing.key").chmod(0o600)
    (directory / "samples.journal").write_text("+s:sample:0/1\n")
    (directory / "snapshots" / "a").mkdir(parents=True)
    RecordedSequences(directory, 2**20)  # open, so that its write-ahead log is there too
    deleted = saved(CheckpointFiles(directory), "tinker://m/weights/deleted")
    store.put_checkpoint(deleted)
    delete_for_good(store, "tinker://m/weights/deleted")
    return directory


def test_the_copy_needs_nothing_else(data: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "copy"
    lines = [
        *(f"tinker://m/weights/{number}" for number in range(3)),
        f"{target} is a copy of {data}: tinsmith serve --data-dir {target}",
    ]
    assert printed("backup", data, str(target)) == lines
    shutil.rmtree(data)
    shutil.rmtree(tmp_path / "elsewhere")
    store, files = Store.open(target), CheckpointFiles(target)
    rows = every_checkpoint(store)
    assert [row.tinker_path for row in rows] == lines[:3]
    assert [files.at(row.directory).sizes() for row in rows] == [{"adapter.safetensors": 10}] * 3
    assert sorted(path.name for path in (target / "checkpoints").iterdir()) == sorted(row.directory for row in rows)
    assert stat.S_IMODE((target / "signing.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert (target / "samples.journal").read_text() == "+s:sample:0/1\n"
    assert store.discarded_directories() == []
    names = {path.name for path in target.iterdir()}
    assert names - {"tinsmith.db-wal", "tinsmith.db-shm"} == {
        "tinsmith.db",
        "checkpoints",
        "signing.key",
        "samples.journal",
    }


def test_what_is_restored_is_what_was_copied_and_damage_is_found(data: Path, tmp_path: Path) -> None:
    backup, restored = tmp_path / "backup", tmp_path / "restored"
    printed("backup", data, str(backup))
    done = tinsmith_here("restore", str(backup), "--data-dir", str(data))
    assert (done.returncode, "is not an empty directory; name a new one" in done.stderr) == (2, True)
    printed("restore", restored, str(backup))
    rows, copied = every_checkpoint(Store.open(data)), every_checkpoint(Store.open(restored))
    assert [row.tinker_path for row in copied] == [row.tinker_path for row in rows]
    assert (restored / "signing.key").read_bytes() == b"k" * 32
    damaged = Path(CheckpointFiles(backup).shown(copied[0].directory)) / "adapter.safetensors"
    os.truncate(damaged, 5)
    done = tinsmith_here("restore", str(backup), "--data-dir", str(tmp_path / "again"))
    assert (done.returncode, f"{damaged} is damaged: it has 5 bytes" in done.stderr) == (2, True)


def test_no_model_comes_back_in_a_copy_which_lacks_its_files(tmp_path: Path) -> None:
    """Wherever it is served: a copy that is put where the original was has its name."""
    store = with_model(tmp_path / "data")
    store.fail_unfinished("the server starts", "here")
    store.record([done(0), HistoryChange(MODEL, {"needed_from": 0}, begins=True)])
    list(back_up(tmp_path / "data", tmp_path / "copy"))
    for directory, left in (("data", {MODEL}), ("copy", set())):
        assert Store.open(tmp_path / directory).fail_unfinished("the server stopped", "here") == left


def test_images_of_operations_are_copied_and_no_operation_is_kept_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_model(tmp_path / "data", keep_bytes=1000)
    other = hashlib.sha256(b"other").digest()
    store.append([step(1, b"one", IMAGE), step(2, b"two", IMAGE), step(3, b"three", IMAGE | {other: b"other"})])
    store.blobs.write({hashlib.sha256(b"unused").digest(): b"unused"})
    claimed = store.queued(MODEL)
    store.record([done(seq_id) for seq_id in (0, 1, 3)])
    whole, part = tmp_path / "whole", tmp_path / "part"
    list(back_up(tmp_path / "data", whole))
    assert blobs_in(whole) == sorted([DIGEST.hex(), other.hex()])
    assert kept(Store.open(whole), claimed) == [0, 1, 2, 3]
    copy = shutil.copyfile

    def deleted_meanwhile(source: Path, target: Path) -> object:
        if Path(source).name == other.hex():
            Path(source).unlink()
        return copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", deleted_meanwhile)
    list(back_up(tmp_path / "data", part))
    assert blobs_in(part) == [DIGEST.hex()]
    assert kept(Store.open(part), claimed) == [0, 1, 2]


def test_damaged_and_missing_checkpoints_are_named_and_the_rest_is_copied(data: Path, tmp_path: Path) -> None:
    files, rows = CheckpointFiles(data), every_checkpoint(Store.open(data))
    damaged, missing, gone = (files.shown(row.directory) for row in rows)
    os.truncate(Path(damaged) / "adapter.safetensors", 5)
    shutil.rmtree(missing)
    done = tinsmith_here("backup", str(tmp_path / "copy"), "--data-dir", str(data))
    assert done.returncode == 2
    assert "are damaged or have no files" in done.stderr
    assert (
        f"tinker://m/weights/0: {damaged}/adapter.safetensors is damaged: it has 5 bytes, and 10 were written"
        in done.stderr
    )
    assert f"tinker://m/weights/1: {missing} does not exist" in done.stderr
    kept = [row.tinker_path for row in every_checkpoint(Store.open(tmp_path / "copy"))]
    assert kept == ["tinker://m/weights/0", "tinker://m/weights/2"]
    files.remove(rows[2].directory)  # from the object store, where nothing of it can be copied
    with pytest.raises(TinsmithError, match=f"tinker://m/weights/2: {gone} does not exist"):
        list(back_up(data, tmp_path / "again"))
    assert [row.tinker_path for row in every_checkpoint(Store.open(tmp_path / "again"))] == kept[:1]


def test_what_is_in_the_way_is_refused(data: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    for target, message in (
        (tmp_path / "used", "is not an empty directory; name a new one"),
        (tmp_path / "used" / "file", "is not an empty directory; name a new one"),
        (data / "copy", "is inside the data directory"),
    ):
        done = tinsmith_here("backup", str(target), "--data-dir", str(data))
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    (tmp_path / "empty").mkdir()
    printed("backup", data, str(tmp_path / "empty"))
    assert every_checkpoint(Store.open(tmp_path / "empty"))


@pytest.mark.parametrize("happens", ["replaced", "deleted"])
def test_a_checkpoint_that_is_deleted_or_replaced_while_it_is_copied(
    happens: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, store, files = "tinker://m/weights/0", Store.open(data), CheckpointFiles(data)
    for row in every_checkpoint(store)[1:]:
        delete_for_good(store, row.tinker_path)
    copy2, happened = shutil.copy2, list[Path]()

    def disturbed(source: Path, target: Path) -> object:
        if source.name == "adapter.safetensors" and not happened:
            happened.append(source)
            if happens == "deleted":
                delete_for_good(store, path)
            else:
                store.put_checkpoint(saved(files, path, created_at=9.0))
            sweep(store, files)
        return copy2(source, target)

    monkeypatch.setattr(shutil, "copy2", disturbed)
    lines = list(back_up(data, tmp_path / "copy"))
    copied = every_checkpoint(Store.open(tmp_path / "copy"))
    if happens == "deleted":
        assert (lines[0], copied) == (f"{path}: deleted meanwhile; not copied", [])
    else:
        assert lines[:2] == [f"{path}: replaced meanwhile; the new one is copied", path]
        sizes = [(row.created_at, CheckpointFiles(tmp_path / "copy").at(row.directory).sizes()) for row in copied]
        assert sizes == [(9.0, {"adapter.safetensors": 10})]


def test_a_full_disk_is_told_in_one_line_and_leaves_nothing(data: Path, tmp_path: Path) -> None:
    command = [*limited_program(resource.RLIMIT_FSIZE, 5000), "backup", str(tmp_path / "copy"), "--data-dir", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tinsmith: {data} could not be copied to {tmp_path / 'copy'}: ")
    assert not (tmp_path / "copy").exists()


def test_a_database_in_postgresql_is_copied_by_its_own_program(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """As the refusal says. The copy is served under another URL."""
    data, copy = tmp_path / "data", tmp_path / "copy"
    name = postgresql.serve(data)
    with closing(Store.open(data)) as store:
        row = saved(CheckpointFiles(data), "tinker://m/weights/a")
        store.put_checkpoint(row)
    refused = tinsmith_here("backup", str(copy), "--data-dir", str(data))
    assert refused.returncode == 2
    assert f"`pg_dump --format=custom --file=FILE 'postgresql://tinsmith@/{name}?host=" in refused.stderr
    assert f", and then copy {data}; this order works beside a server" in refused.stderr
    assert not copy.exists()
    dump, restored = str(postgresql.directory / f"{name}.dump"), postgresql.new_database()
    where = "--host", str(postgresql.directory), "--username", "tinsmith"
    postgresql.run("pg_dump", *where, "--format=custom", "--file", dump, name)
    postgresql.run("pg_restore", *where, "--dbname", restored, dump)
    shutil.copytree(data, copy)
    (copy / URL_FILE).write_text(postgresql.url(restored))
    shutil.rmtree(data)
    with closing(Store.open(copy)) as store:
        store.check()
        assert store.require_checkpoint("tinker://m/weights/a") == row
        assert CheckpointFiles(copy).at(row.directory).sizes() == {"adapter.safetensors": 10}
