"""The files of checkpoints: directories that are written once, whole or not at all, below the data directory or in an object store.

Where one lies is a text that its row keeps: a name below the data directory's `checkpoints`, or, for a root of one's own, its URL. So the
data directory can be moved, and checkpoints are found after the root has changed. Everything goes through fsspec.
"""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from tinsmith.errors import ConfigError, NotFoundError

CHECKPOINTS_DIR = "checkpoints"
"""Where files lie below a data directory."""
WRITING_PREFIX = ".writing-"
"""Begins the names of directories that are not finished, and then goes the name of the one that they are for."""
_BLOCK_BYTES = 2**20


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A new directory to fill beside the final one; when the body ends it is flushed to the disk and renamed, else nothing is there."""
    with tempfile.TemporaryDirectory(
        prefix=f"{WRITING_PREFIX}{directory.name}-", dir=directory.parent, ignore_cleanup_errors=True
    ) as temporary:
        files = Path(temporary)
        yield files
        for path in (*files.rglob("*"), files):
            _flush(path)
        files.rename(directory)
    _flush(directory.parent)


def _flush(path: Path) -> None:
    """Make the disk hold what was written to a file or directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class CheckpointFiles:
    """Directories of checkpoint files by their place."""

    def __init__(self, data_dir: Path, root: str = "") -> None:
        """New directories come below `root`, a directory or a URL of fsspec; an empty one means the data directory.

        Raises ConfigError for a root that cannot be used.
        """
        self._home = (data_dir / CHECKPOINTS_DIR).resolve()
        self._root = root.rstrip("/")
        self._home.mkdir(parents=True, exist_ok=True)
        if root:
            self._check(root)

    def _check(self, root: str) -> None:
        try:
            system, path = self._resolve(self._root)
            system.makedirs(path, exist_ok=True)
            system.ls(path)
        except (ImportError, OSError, ValueError) as error:  # no such kind of store, or no access to this one
            raise ConfigError(f"checkpoint_root={root!r} cannot be used: {error}") from error

    def new_place(self) -> str:
        """A place that nothing lies at. No client has a say in it."""
        name = uuid.uuid4().hex
        return f"{self._root}/{name}" if self._root else name

    @contextmanager
    def written(self, place: str) -> Iterator[Path]:
        """The path of a local directory that does not exist; the body makes it, complete. Then it lies at `place`."""
        system, path = self._resolve(place)
        if isinstance(system, LocalFileSystem):
            yield Path(path)
            return
        with tempfile.TemporaryDirectory(prefix=WRITING_PREFIX, dir=self._home) as scratch:
            directory = Path(scratch) / "files"
            yield directory
            for file in sorted(file for file in directory.rglob("*") if file.is_file()):
                system.put_file(str(file), f"{path}/{file.relative_to(directory)}")

    @contextmanager
    def fetched(self, place: str) -> Iterator[Path]:
        """A local directory of the files, to read while the body runs. Raises NotFoundError if they were deleted meanwhile."""
        system, path = self._resolve(place)
        try:
            if isinstance(system, LocalFileSystem):
                yield Path(path)
                return
            with tempfile.TemporaryDirectory(prefix=WRITING_PREFIX, dir=self._home) as scratch:
                for name in self.sizes(place):
                    system.get_file(f"{path}/{name}", str(Path(scratch) / name))
                yield Path(scratch)
        except FileNotFoundError as error:
            raise NotFoundError("the files of this checkpoint are gone: it was deleted while it was read") from error

    def sizes(self, place: str) -> dict[str, int]:
        """Bytes of each file by its name; empty if nothing is there."""
        system, path = self._resolve(place)
        found = system.find(path, detail=True)
        return {name.removeprefix(f"{path}/"): info["size"] for name, info in sorted(found.items())}

    def read(self, place: str, name: str) -> Iterator[bytes]:
        """One of the files that `sizes` names, in blocks."""
        system, path = self._resolve(place)
        with system.open(f"{path}/{name}", "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                yield block

    def remove(self, place: str) -> None:
        """Delete a directory, and what a process that died left while it wrote it. Nothing being there is right, too."""
        system, path = self._resolve(place)
        parent, _, name = path.rpartition("/")
        unfinished = system.glob(f"{parent}/{WRITING_PREFIX}{name}-*") if isinstance(system, LocalFileSystem) else []
        for directory in (path, *unfinished):
            with suppress(FileNotFoundError):
                system.rm(directory, recursive=True)

    def _resolve(self, place: str) -> tuple[AbstractFileSystem, str]:
        """The file system of a place, and the path in it."""
        url = place if "/" in place else str(self._home / place)
        # Listings are not cached: the other process writes, too.
        system, path = url_to_fs(url, use_listings_cache=False)
        return system, path
