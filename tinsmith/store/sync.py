"""Making the disk hold what was written: a power cut then takes nothing of it."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """The content of a file, or the names in a directory: what was made, renamed or deleted there. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Make a directory and its parents, on the disk, unless it is there. Raises OSError."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
