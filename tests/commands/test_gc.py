"""`tinsmith gc`."""

import hashlib
import time
from pathlib import Path

import pytest

from tests.commands.test_recover import printed
from tests.store.test_blobs import DIGEST, IMAGE, blobs_in, with_model
from tests.store.test_commands import step
from tests.store.test_files import write
from tests.store.test_sweep import saved
from tinsmith.store.disk import only_user
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")

NOTHING = "there is nothing to delete"


def deleted(data_dir: Path, things: list[str], total: str, *options: str, kept: tuple[str, ...] = ()) -> None:
    """A dry run says all this, then it goes."""
    assert printed("gc", data_dir, "--dry-run", *options) == [*things, f"{total}  bytes would be freed", *kept]
    assert printed("gc", data_dir, *options) == [*things, f"{total}  bytes are freed", *kept]
    assert printed("gc", data_dir, *options) == [NOTHING, *kept]


def test_complete_files_that_the_database_does_not_know_are_kept_unless_asked_for(tmp_path: Path) -> None:
    store, files = Store.open(tmp_path), CheckpointFiles(tmp_path)
    saved(store, files, "tinker://m/weights/old", time.time() - 1)
    kept, orphan = saved(store, files, "tinker://m/weights/kept"), write(files)
    (tmp_path / "snapshots" / "a").mkdir(parents=True)
    (tmp_path / "snapshots" / "a" / "weights").write_bytes(bytes(2000))
    unknown = (
        "             10  bytes are kept in 1 complete checkpoints that are not in the database: "
        f"`tinsmith recover --data-dir {tmp_path}` adds them, `tinsmith gc --unknown` deletes them"
    )
    old = "             10  tinker://m/weights/old: has expired"
    snapshots = "          2,000  snapshots: their models do not come back"
    deleted(tmp_path, [old, snapshots], "          2,010", kept=(unknown,))
    assert files.at(orphan).sizes()
    deleted(
        tmp_path,
        [f"             10  files of {orphan}: the database does not know them"],
        "             10",
        "--unknown",
    )
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [kept]
    assert not (tmp_path / "snapshots").exists()


def test_images_that_no_operation_needs_go(tmp_path: Path) -> None:
    store = with_model(tmp_path)
    store.append([step(1, images=IMAGE)])
    assert printed("gc", tmp_path) == [NOTHING]
    store.blobs.write({hashlib.sha256(bytes(1234)).digest(): bytes(1234)})
    assert len(blobs_in(tmp_path)) == 2
    deleted(tmp_path, ["          1,234  1 images of operations: no operation needs them"], "          1,234")
    assert blobs_in(tmp_path) == [DIGEST.hex()]


def test_the_snapshots_of_a_running_server_are_left_alone(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "weights").write_bytes(b"0")
    with only_user(tmp_path) as alone:
        assert alone
        assert printed("gc", tmp_path) == [NOTHING]
    assert printed("gc", tmp_path, "--dry-run")[-1] == "              1  bytes would be freed"
