"""Images as files: there as long as a command needs them, whoever dies or deletes when.

Invariant: No image that a command needs is deleted, whichever process deletes images; files left by a crash are swept.
"""

import hashlib
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.databases import locked, run_sql
from tests.preloaded import REAL_PYTHON
from tests.store.power_cut import recorded
from tests.store.test_commands import DESCRIPTION, MODEL, SESSION, create_command, done, step
from tinsmith.errors import StoreUnavailableError, TinsmithError
from tinsmith.store.blobs import BlobFiles
from tinsmith.store.records import NewCommand
from tinsmith.store.store import Store

DATA = b"an encoded image"
DIGEST = hashlib.sha256(DATA).digest()
IMAGE = {DIGEST: DATA}

CRASH = """
import hashlib, os, signal, sys
from pathlib import Path
from tests.store.test_blobs import IMAGE
from tests.store.test_commands import step
from tinsmith.store import commands
from tinsmith.store.store import Store
commands.append = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
Store.open(Path(sys.argv[1])).append([step(1, images=IMAGE)])
"""
"""A process that dies between the file and the row."""


@pytest.fixture
def store(database: object, tmp_path: Path) -> Store:
    return with_model(tmp_path)


def with_model(data_dir: Path, keep_bytes: int = 0) -> Store:
    store = Store.open(data_dir, keep_bytes=keep_bytes)
    store.create_session(SESSION, DESCRIPTION)
    store.append([create_command()])
    return store


def blobs_in(data_dir: Path) -> list[str]:
    """The names of the files below the directory of blobs."""
    return sorted(path.name for path in (data_dir / "blobs").rglob("*") if path.is_file())


def test_an_image_is_a_file_named_by_its_digest_until_no_command_needs_it(store: Store, tmp_path: Path) -> None:
    """Digests come with their command in the order of the payload."""
    other = hashlib.sha256(b"other").digest()
    digests = [DIGEST, other, DIGEST]
    store.append(
        [NewCommand(MODEL, 1, "forward_backward", b"p", digests, IMAGE | {other: b"other"}), step(2, images=IMAGE)]
    )
    assert [command.image_digests for command in store.queued(MODEL)] == [(), tuple(digests), (DIGEST,)]
    assert [store.blobs.read(digest) for digest in digests] == [DATA, b"other", DATA]
    file = tmp_path / "blobs" / DIGEST.hex()[:2] / DIGEST.hex()
    assert file.read_bytes() == DATA
    assert blobs_in(tmp_path) == sorted([file.name, other.hex()])
    assert all(DATA not in bytes(payload) for (payload,) in run_sql(tmp_path, "SELECT payload FROM commands"))
    store.record([done(1)])
    assert blobs_in(tmp_path) == [file.name]
    store.record([done(2)])
    assert blobs_in(tmp_path) == []


def test_images_of_commands_that_are_not_queued_go(store: Store, tmp_path: Path) -> None:
    """But not that of a command which is sent again."""
    store.append([step(1), step(3, images=IMAGE)])
    assert store.append([step(3, images=IMAGE)]) == [False]
    assert store.blobs.read(DIGEST) == DATA
    store.record([done(3)])
    assert store.append([step(1, images=IMAGE)]) == [False]
    store.finish_session(SESSION, "success", None)
    assert store.append([step(2, images=IMAGE)]) == [False]
    assert blobs_in(tmp_path) == []


def test_a_crash_between_file_and_row_leaves_a_file_that_the_next_start_deletes(store: Store, tmp_path: Path) -> None:
    done = subprocess.run([REAL_PYTHON, "-c", CRASH, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert blobs_in(tmp_path) == [DIGEST.hex()]
    assert store.status(f"{MODEL}/1") is None
    assert [file.size for file in store.unused_blobs()] == [len(DATA)]
    store.fail_unfinished("the server stopped")
    assert blobs_in(tmp_path) == []


def test_an_image_is_on_the_disk_before_the_row_that_needs_it(tmp_path: Path) -> None:
    """Whenever the power fails: one that is new, and one that another command has already."""
    cuts: list[Path] = []

    def cut() -> None:
        cuts.append(tmp_path / f"cut {len(cuts)}")
        disk.cut(tmp_path / "data", cuts[-1])

    with recorded() as disk:
        store = with_model(tmp_path / "data")
        disk.before_each = cut
        for seq_id in (1, 2):
            store.append([step(seq_id, images=IMAGE)])
        cut()
    found = list[int]()
    for left in cuts:
        with closing(Store.open(left)) as after:
            needed = [digest for command in after.queued(MODEL) for digest in command.image_digests]
            assert [after.blobs.read(digest) for digest in needed] == [DATA] * len(needed)
            found.append(len(needed))
    assert (found[0], found[-1]) == (0, 2)


def test_what_was_never_finished_goes_after_a_day(store: Store, tmp_path: Path) -> None:
    store.append([step(1, images=IMAGE)])
    new, old = (tmp_path / "blobs" / DIGEST.hex()[:2] / f".writing-{name}" for name in ("new", "old"))
    for file in (new, old):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert [file.path for file in store.unused_blobs()] == [old]
    store.sweep_blobs()
    assert blobs_in(tmp_path) == sorted([new.name, DIGEST.hex()])


@pytest.mark.parametrize("is_there", [True, False])
def test_an_image_that_is_deleted_while_a_command_is_appended_is_written_again(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Between file and row: with the last command that had it, or by a sweep."""
    if is_there:
        store.append([step(1, images=IMAGE)])
    engine, write = Store.open(tmp_path), BlobFiles.write

    def interrupted(files: BlobFiles, blobs: Mapping[bytes, bytes]) -> None:
        write(files, blobs)
        monkeypatch.setattr(BlobFiles, "write", write)
        engine.record([done(1)])
        engine.sweep_blobs()
        assert blobs_in(tmp_path) == []

    monkeypatch.setattr(BlobFiles, "write", interrupted)
    store.append([step(2, images=IMAGE)])
    assert store.blobs.read(DIGEST) == DATA


def test_a_disk_that_takes_no_image_takes_no_command(store: Store, tmp_path: Path) -> None:
    (tmp_path / "blobs").write_bytes(b"in the way")
    with pytest.raises(
        StoreUnavailableError,
        match=r"images cannot be stored or read at the moment: .*Not a directory.*; see to .*blobs",
    ):
        store.append([step(1, images=IMAGE)])
    assert store.status(f"{MODEL}/1") is None
    (tmp_path / "blobs").unlink()
    assert store.append([step(1, images=IMAGE)]) == [True]


def test_an_image_that_cannot_be_deleted_now_is_deleted_later(store: Store, tmp_path: Path) -> None:
    store.append([step(1, images=IMAGE), step(2, images={hashlib.sha256(b"2").digest(): b"2"})])
    impatient = Store.open(tmp_path, busy_s=0.05)
    with locked(tmp_path):
        impatient.delete_unused_blobs([DIGEST])
    assert len(blobs_in(tmp_path)) == 2
    store.record([done(1)])
    impatient.record([done(2)])
    assert blobs_in(tmp_path) == []


def test_a_damaged_image_is_refused_and_can_be_sent_again(store: Store, tmp_path: Path) -> None:
    store.append([step(1, images=IMAGE)])
    BlobFiles(tmp_path).path(DIGEST).write_bytes(bytes(len(DATA)))
    with pytest.raises(TinsmithError, match=f"{DIGEST.hex()} was damaged: its SHA-256 was another than its name"):
        store.blobs.read(DIGEST)
    assert store.blobs.read(DIGEST) is None
    store.append([step(2, images=IMAGE)])
    assert store.blobs.read(DIGEST) == DATA
