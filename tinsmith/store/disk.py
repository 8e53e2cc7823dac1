"""Syncs, locks and limits of files.

A lock keeps a second server, which would fail the first one's operations, from a data directory.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from tinsmith.errors import ConfigError, translated

Key = TypeVar("Key")

LOCK_NAME = "server.lock"
_SYNCED_AT_ONCE = 16


def sync(path: Path) -> None:
    """Sync a file's content, or the names in a directory. Raises OSError."""
    with opened(path, os.O_RDONLY) as descriptor:
        os.fsync(descriptor)


def sync_all(paths: Iterable[Path]) -> None:
    """Sync files and directories, many at a time, which file systems do in one go. Raises OSError."""
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as threads:
        for _ in threads.map(sync, paths):
            pass


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o777) -> Iterator[int]:
    """The descriptor of a file, as of `os.open`."""
    descriptor = os.open(path, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def renamed(temporary: Path, target: Path) -> Iterator[None]:
    """Rename the file that the body writes to `target`, for good; delete it upon an OSError."""
    try:
        yield
        sync(temporary)
        temporary.rename(target)
        sync(target.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, synced, unless they exist. Raises OSError."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


def oldest_beyond(most_bytes: int, all_bytes: int, oldest_first: Iterable[tuple[Key, int]]) -> Iterator[Key]:
    """Keys of the oldest entries (key, bytes) that must go so that at most `most_bytes` of `all_bytes` are left."""
    for key, size in oldest_first:
        if all_bytes <= most_bytes:
            return
        all_bytes -= size
        yield key


def open_lock(path: Path, flags: int = os.O_CREAT) -> IO[str]:
    """Open a file to lock it, made if there is none. Links are not followed, nothing is written. Raises ConfigError."""
    with _lockable(path):
        return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666), "w")


@contextmanager
def only_user(data_dir: Path) -> Iterator[bool]:
    """Hold the lock of a data directory. Yields False if another process has it."""
    path = data_dir / LOCK_NAME
    with open_lock(path) as lock:
        yield _locked(path, lock, fcntl.LOCK_EX)


def is_used(data_dir: Path) -> bool:
    """Whether a process holds the lock of a data directory, which need not exist. Raises ConfigError."""
    path = data_dir / LOCK_NAME
    if not os.path.lexists(path):
        return False
    with open_lock(path, 0) as lock:
        return not _locked(path, lock, fcntl.LOCK_SH)


def _locked(path: Path, lock: IO[str], kind: int) -> bool:
    """Lock an open file; False if another process has it."""
    with _lockable(path), suppress(BlockingIOError):
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
        return True
    return False


def _lockable(path: Path) -> AbstractContextManager[None]:
    def why_not(error: OSError) -> str:
        why = "it is a link" if path.is_symlink() else error.strerror
        return f"{path} cannot be locked: {why}; remove it, and let the server write to {path.parent}"

    return translated(OSError, ConfigError, why_not)
