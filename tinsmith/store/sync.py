"""Syncs files and directories to the disk, so that they survive a power cut."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Sync the content of a file, or the names in a directory: what was created, renamed or deleted there. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create a directory and its parents, synced to the disk, unless they exist. Raises OSError."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)
