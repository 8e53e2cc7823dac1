"""What the disk holds when the power fails: the content and the names that were synced, and of what was written
beyond that nothing, or a part.

A commit of SQLite is on the disk if its connection has synchronous=FULL: the file, its log and their names are taken as
they are then (SQLite syncs the directory with the first sync of a log that it opened). What SQLite syncs beyond that
counts as written only.
"""

import os
import random
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FULL = 2
"""What `PRAGMA synchronous` says."""


class Disk:
    """Records syncs. Inodes stand for files, as a rename changes names only."""

    def __init__(self) -> None:
        self.contents: dict[int, bytes] = {}
        """Synced content of files."""
        self.names: dict[int, dict[str, os.stat_result]] = {}
        """Synced names in directories, and what they mean."""
        self.lock = threading.RLock()
        self.before_each: Callable[[], object] = lambda: None
        """Called before each sync, at the last moment of what the disk held until then."""

    def sync(self, descriptor: int) -> None:
        """Take what a file or directory holds now."""
        with self.lock:
            self.before_each()
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                names = os.listdir(descriptor)
                self.names[status.st_ino] = {name: os.stat(name, dir_fd=descriptor) for name in names}
            else:
                self.contents[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def commit(self, *paths: Path) -> None:
        """Take the contents and names of the files of a database."""
        with self.lock:
            self.before_each()
            for path in filter(Path.exists, paths):
                self.contents[path.stat().st_ino] = path.read_bytes()
                self.names.setdefault(path.parent.stat().st_ino, {})[path.name] = path.stat()

    def cut(self, directory: Path, left: Path, chance: random.Random | None = None) -> None:
        """Make `left` what is found in `directory` after the power failed now.

        With `chance`, also some names that were not synced, and beginnings of what was written to the end of files; and
        some names are gone that were deleted.
        """
        with self.lock:
            self._copy(directory.stat().st_ino, directory, left, chance)

    def _copy(self, inode: int, directory: Path, target: Path, chance: random.Random | None) -> None:
        target.mkdir()
        there = {path.name: path.stat() for path in directory.iterdir()} if directory.is_dir() else {}
        names = self.names.get(inode, {})
        if chance is not None:
            changed = {name for name in names.keys() | there.keys() if _inode(names, name) != _inode(there, name)}
            taken = {name for name in sorted(changed) if chance.random() < 0.5}
            names = {name: inside for name, inside in names.items() if name not in taken}
            names |= {name: inside for name, inside in there.items() if name in taken}
        for name, inside in sorted(names.items()):
            if stat.S_ISDIR(inside.st_mode):
                self._copy(inside.st_ino, directory / name, target / name, chance)
            else:
                content = self.contents.get(inside.st_ino, b"")
                if chance is not None and _inode(there, name) == inside.st_ino:
                    written = (directory / name).read_bytes()
                    if written.startswith(content):
                        content = written[: chance.randint(len(content), len(written))]
                (target / name).write_bytes(content)


def _inode(names: dict[str, os.stat_result], name: str) -> int | None:
    return names[name].st_ino if name in names else None


@contextmanager
def recorded() -> Iterator[Disk]:
    """Record what this process syncs while the body runs."""
    disk = Disk()
    fsync, connect = os.fsync, sqlite3.connect

    def recording_fsync(descriptor: int) -> None:
        fsync(descriptor)
        disk.sync(descriptor)

    class Connection(sqlite3.Connection):
        """Says when it has committed durably."""

        def commit(self) -> None:
            with disk.lock:  # or the log might be written anew while it is read
                super().commit()
                if self.execute("PRAGMA synchronous").fetchone() == (FULL,):
                    _, _, file = self.execute("PRAGMA database_list").fetchone()
                    disk.commit(Path(file), Path(f"{file}-wal"))

    def recording_connect(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
        opened: sqlite3.Connection = connect(*arguments, **keywords | {"factory": Connection})
        return opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recording_fsync)
        patch.setattr(sqlite3.dbapi2, "connect", recording_connect)
        yield disk
