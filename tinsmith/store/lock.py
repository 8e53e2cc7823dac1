"""Lets only one server use a data directory: a second one would fail the operations of the first."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_NAME = "server.lock"


@contextmanager
def only_user(data_dir: Path) -> Iterator[bool]:
    """Hold the lock of a data directory while the body runs. Yields False, without a lock, if another process has it."""
    with (data_dir / FILE_NAME).open("w") as lock:
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
