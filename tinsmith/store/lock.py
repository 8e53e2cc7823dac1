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
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "w")
    except OSError as error:
        why = "it is a link" if path.is_symlink() else error.strerror
        raise ConfigError(f"{path} cannot be locked: {why}; remove it, and let the server write to {path.parent}") from error


@contextmanager
def only_user(data_dir: Path) -> Iterator[bool]:
    """Hold the lock of a data directory while the body runs. Yields False, without a lock, if another process has it."""
    with open_lock(data_dir / FILE_NAME) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def is_used(data_dir: Path) -> bool:
    """Whether a process holds the lock of a data directory, which need not exist."""
    try:
        with (data_dir / FILE_NAME).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it has none, or is none
        return False
    return False
