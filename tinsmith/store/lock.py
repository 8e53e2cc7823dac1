"""Files that are locked. One lets only one server use a data directory: a second one would fail the operations of the first."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tinsmith.errors import ConfigError

FILE_NAME = "server.lock"


def open_lock(path: Path) -> IO[str]:
    """Open a file to lock it, made if there is none. Nothing is written to it, nor to what a link of its name leads to.

    Raises ConfigError if it cannot be opened.
    """
    return _opened(path, os.O_CREAT)


@contextmanager
def only_user(data_dir: Path) -> Iterator[bool]:
    """Hold the lock of a data directory while the body runs. Yields False, without a lock, if another process has it."""
    path = data_dir / FILE_NAME
    with open_lock(path) as lock:
        yield _locked(path, lock, fcntl.LOCK_EX)


def is_used(data_dir: Path) -> bool:
    """Whether a process holds the lock of a data directory, which need not exist. Raises ConfigError where `only_user` would."""
    path = data_dir / FILE_NAME
    if not os.path.lexists(path):
        return False
    with _opened(path) as lock:
        return not _locked(path, lock, fcntl.LOCK_SH)


def _opened(path: Path, flags: int = 0) -> IO[str]:
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o666), "w")
    except OSError as error:
        raise _refusal(path, error) from error


def _locked(path: Path, lock: IO[str], kind: int) -> bool:
    """Lock an open file; False if another process has it."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _refusal(path, error) from error
    return True


def _refusal(path: Path, error: OSError) -> ConfigError:
    why = "it is a link" if path.is_symlink() else error.strerror
    return ConfigError(f"{path} cannot be locked: {why}; remove it, and let the server write to {path.parent}")
