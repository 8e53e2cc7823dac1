"""`tinsmith gc`."""

import hashlib
import time
from pathlib import Path

from tests.running import tinsmith_here
from tests.store.test_blobs import DIGEST, IMAGE, blobs_in, with_model
from tests.store.test_commands import step
from tests.store.test_files import write
from tests.store.test_sweep import saved
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.lock import only_user
from tinsmith.store.store import Store


def gc(data_dir: Path, *options: str) -> list[str]:
    """The lines that it prints."""
    done = tinsmith_here("gc", "--data-dir", str(data_dir), *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_complete_files_that_the_database_does_not_know_are_kept_unless_asked_for(tmp_path: Path) -> None:
    store, files = Store.open(tmp_path), CheckpointFiles(tmp_path)
    saved(store, files, "tinker://m/weights/old", time.time() - 1)
    orphan = write(files)
    kept = (
        "             10  bytes are kept in 1 complete checkpoints that are not in the database: "
        f"`tinsmith recover --data-dir {tmp_path}` adds them, `tinsmith gc --unknown` deletes them"
    )
    old = "             10  tinker://m/weights/old: has expired"
    assert gc(tmp_path, "--dry-run") == [old, "             10  bytes would be freed", kept]
    assert gc(tmp_path) == [old, "             10  bytes are freed", kept]
    assert gc(tmp_path) == ["there is nothing to delete", kept]
    assert files.sizes(orphan)


def test_a_dry_run_says_what_then_goes(tmp_path: Path) -> None:
    store, files = Store.open(tmp_path), CheckpointFiles(tmp_path)
    saved(store, files, "tinker://m/weights/old", time.time() - 1)
    kept, orphan = saved(store, files, "tinker://m/weights/kept"), write(files)
    (tmp_path / "snapshots" / "a").mkdir(parents=True)
    (tmp_path / "snapshots" / "a" / "weights").write_bytes(bytes(2000))
    things = [
        "             10  tinker://m/weights/old: has expired",
        f"             10  files of {orphan}: the database does not know them",
        "          2,000  snapshots: the engine that wrote them has ended",
    ]
    assert gc(tmp_path, "--dry-run", "--unknown") == [*things, "          2,020  bytes would be freed"]
    assert files.sizes(orphan)
    assert gc(tmp_path, "--unknown") == [*things, "          2,020  bytes are freed"]
    assert gc(tmp_path) == ["there is nothing to delete"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [kept]
    assert not (tmp_path / "snapshots").exists()


def test_images_that_no_operation_needs_go(tmp_path: Path) -> None:
    store = with_model(tmp_path)
    store.append([step(1, images=IMAGE)])
    assert gc(tmp_path) == ["there is nothing to delete"]
    store.write_blobs({hashlib.sha256(bytes(1234)).digest(): bytes(1234)})
    things = ["          1,234  1 images of operations: no operation needs them"]
    assert gc(tmp_path, "--dry-run") == [*things, "          1,234  bytes would be freed"]
    assert len(blobs_in(tmp_path)) == 2
    assert gc(tmp_path) == [*things, "          1,234  bytes are freed"]
    assert blobs_in(tmp_path) == [DIGEST.hex()]


def test_the_snapshots_of_a_running_server_are_left_alone(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "weights").write_bytes(b"0")
    with only_user(tmp_path) as alone:
        assert alone
        assert gc(tmp_path) == ["there is nothing to delete"]
    assert gc(tmp_path, "--dry-run")[-1] == "              1  bytes would be freed"
