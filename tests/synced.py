"""Lets the processes of a server log what they sync, and cuts its files as if the power had failed.

A process that is started with the environment of `logging_to` imports this module first. It then adds a line to a file
for each sync: the size of a file, the names in a directory, and for each commit of SQLite with synchronous=FULL how
many frames its log had. All our files are written once, or only added to.
"""

import json
import os
import random
import shutil
import sqlite3
import stat
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.preloaded import FIRST

LOG = "TINSMITH_TEST_SYNCS"
"""Names the file in the environment."""

_FULL = 2
_HEADER, _FRAME_HEADER = 32, 24
"""Bytes of a write-ahead log in front of its frames, and in front of the page in each."""
_FRAMES = struct.Struct("=16xI12x8s")
"""In `-shm`: the number of frames that are committed, and the salt of their log."""


def logging_to(file: Path) -> dict[str, str]:
    """The environment of a server that logs its syncs to that file."""
    return {LOG: str(file), FIRST: __name__}


def _note(kind: str, key: str, value: Any) -> None:
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{json.dumps([kind, key, value])}\n".encode())
    os.close(file)


def record() -> None:
    """Log what this process syncs from now on."""
    fsync, connect = os.fsync, sqlite3.connect

    def logged_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        is_directory = stat.S_ISDIR(status.st_mode)
        held = sorted(os.listdir(descriptor)) if is_directory else status.st_size
        fsync(descriptor)
        _note("synced", str(status.st_ino), held)

    class Connection(sqlite3.Connection):
        def commit(self) -> None:
            super().commit()
            if self.execute("PRAGMA synchronous").fetchone() == (_FULL,):
                _, _, file = self.execute("PRAGMA database_list").fetchone()
                frames, salt = _FRAMES.unpack_from(Path(f"{file}-shm").read_bytes()[: _FRAMES.size])
                _note("committed", salt.hex(), frames)

    def logged_connect(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
        opened: sqlite3.Connection = connect(*arguments, **keywords | {"factory": Connection})
        return opened

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "fsync", logged_fsync)
    patch.setattr(sqlite3.dbapi2, "connect", logged_connect)


if LOG in os.environ:
    record()


def cut(data_dir: Path, log: Path, chance: random.Random) -> int:
    """Cut the files of a directory whose server is dead, anywhere behind what was synced; returns how many bytes go."""
    synced: dict[str, Any] = {}
    frames: dict[str, int] = {}
    for kind, key, value in map(json.loads, log.read_text().splitlines()):
        if kind == "synced":
            synced[key] = value
        else:
            frames[key] = max(value, frames.get(key, 0))
    gone = 0
    for directory, names, files in os.walk(data_dir):
        place = Path(directory)
        kept = synced.get(str(place.stat().st_ino), [])
        for name in list(names):
            if name not in kept and chance.random() < 0.5:
                gone += sum(file.stat().st_size for file in (place / name).rglob("*"))
                shutil.rmtree(place / name)
                names.remove(name)
        gone += sum(_cut_file(place / name, name in kept, synced, frames, chance) for name in files)
    return gone


def _cut_file(file: Path, is_named: bool, synced: dict[str, Any], frames: dict[str, int], chance: random.Random) -> int:
    """Cut a file, or delete it if its directory was not synced with its name; returns how many bytes go."""
    if file.is_socket():  # nobody listens there any more, whether its name is left or not
        if chance.random() < 0.5:
            file.unlink()
        return 0
    size = file.stat().st_size
    least = synced.get(str(file.stat().st_ino), 0)
    if file.suffix == ".db":  # what it has in its place is in its log too
        least = size
    elif file.name == "tinsmith.db-wal":
        least = _synced_bytes(file, frames)
    elif file.name.endswith("-shm") or (not is_named and chance.random() < 0.5):
        file.unlink()
        return size
    left = chance.randint(min(size, least), size)
    os.truncate(file, left)
    return size - left


def _synced_bytes(log: Path, frames: dict[str, int]) -> int:
    header = log.read_bytes()[:_HEADER]
    if len(header) < _HEADER:
        return 0
    page, salt = int.from_bytes(header[8:12], "big"), header[16:24]
    return _HEADER + frames.get(salt.hex(), 0) * (_FRAME_HEADER + page)
