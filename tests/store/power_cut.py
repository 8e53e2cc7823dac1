"""What the disk holds when the power fails: the content and the names that were synced, and nothing else that was
written.

A file that was never synced is empty afterwards, a name that its directory was not synced with is gone. A commit of
SQLite is on the disk if its connection has synchronous=FULL: the file, its log and their names are taken as they are
then (SQLite syncs the directory with the first sync of a log that it opened). What SQLite syncs beyond that counts as
lost.
"""

import os
import sqlite3
import stat
from collections.abc import Iterator
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

    def sync(self, descriptor: int) -> None:
        """Take what a file or directory holds now."""
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            names = os.listdir(descriptor)
            self.names[status.st_ino] = {name: os.stat(name, dir_fd=descriptor) for name in names}
        else:
            self.contents[status.st_ino] = os.pread(descriptor, status.st_size, 0)

    def sync_path(self, path: Path) -> None:
        """Take the content and the name of a file, if it is there."""
        if path.exists():
            descriptor = os.open(path, os.O_RDONLY)
            self.sync(descriptor)
            os.close(descriptor)
            self.names.setdefault(path.parent.stat().st_ino, {})[path.name] = path.stat()

    def cut(self, directory: Path, left: Path) -> None:
        """Make `left` what is found in `directory` after the power failed now."""
        self._copy(directory.stat().st_ino, left)

    def _copy(self, inode: int, target: Path) -> None:
        target.mkdir()
        for name, inside in self.names.get(inode, {}).items():
            if stat.S_ISDIR(inside.st_mode):
                self._copy(inside.st_ino, target / name)
            else:
                (target / name).write_bytes(self.contents.get(inside.st_ino, b""))


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
            super().commit()
            if self.execute("PRAGMA synchronous").fetchone() == (FULL,):
                _, _, file = self.execute("PRAGMA database_list").fetchone()
                for path in (file, f"{file}-wal"):
                    disk.sync_path(Path(path))

    def recording_connect(*arguments: Any, **keywords: Any) -> sqlite3.Connection:
        opened: sqlite3.Connection = connect(*arguments, **keywords | {"factory": Connection})
        return opened

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", recording_fsync)
        patch.setattr(sqlite3.dbapi2, "connect", recording_connect)
        yield disk
