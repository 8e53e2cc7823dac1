"""Encoded images as files named by the SHA-256 of their bytes: `blobs/ab/abcd...` in the data directory.

A file is written before the row that refers to it is committed, and deleted only in a write transaction, once no row
does; the transaction that adds a row checks that the file is still there (`Store.append`, `Store.delete_unused_blobs`).
So a process that dies may leave a file without a row, never a row without its file. Nor does a power cut: files are
synced before they get their names, and names before the row. What is read is compared with the digest all the same.
"""

import hashlib
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import StoreUnavailableError, TinsmithError, translated
from tinsmith.store.disk import make_directory, sync_all

BLOBS_DIR = "blobs"
_WRITING_PREFIX = ".writing-"
_WRITING_S = 86400.0
"""Older unfinished files were left by a process that died."""


@dataclass(frozen=True)
class BlobFile:
    """A file of a blob."""

    path: Path
    sha256: bytes | None
    """None if it was never finished."""
    size: int


class BlobFiles:
    """The blobs of a data directory, for any processes and threads."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / BLOBS_DIR

    def path(self, sha256: bytes) -> Path:
        name = sha256.hex()
        return self._directory / name[:2] / name

    def write(self, blobs: Mapping[bytes, bytes]) -> None:
        """Write the blobs that are not there yet, by digest, for good. Raises StoreUnavailableError."""
        begun: dict[Path, Path] = {}
        """Final path by temporary one."""
        with _available(self._directory), ExitStack() as undo:
            for sha256, data in blobs.items():
                path = self.path(sha256)
                if not path.exists():
                    make_directory(path.parent)
                    temporary = path.with_name(f"{_WRITING_PREFIX}{uuid.uuid4().hex}")
                    undo.callback(temporary.unlink, missing_ok=True)
                    begun[temporary] = path
                    temporary.write_bytes(data)
            if begun:
                sync_all(begun)
                for temporary, path in begun.items():
                    temporary.rename(path)
                # The names of directories too: a process may have died that had just made them
                sync_all({self._directory, *(path.parent for path in begun.values())})

    def read(self, sha256: bytes) -> bytes | None:
        """The blob, if it is there. Raises StoreUnavailableError if it cannot be read now.

        Raises TinsmithError for a damaged file, and deletes it, so that the blob is written when it is sent again.
        """
        path = self.path(sha256)
        with _available(path), suppress(FileNotFoundError):
            data = path.read_bytes()
            if hashlib.sha256(data).digest() == sha256:
                return data
            path.unlink(missing_ok=True)
            raise TinsmithError(
                f"{path} was damaged: its SHA-256 was another than its name; it is deleted, send the image again"
            )
        return None

    def copy(self, sha256: bytes, to: "BlobFiles") -> bool:
        """Copy a blob to another data directory. False if it is not here. Raises OSError."""
        target = to.path(sha256)
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            shutil.copyfile(self.path(sha256), target)
            return True
        return False

    def remove(self, sha256: bytes) -> None:
        """Delete a blob, if it is there. Only in a write transaction that has seen that nothing refers to it."""
        with _available(self._directory):
            self.path(sha256).unlink(missing_ok=True)

    def files(self) -> Iterator[BlobFile]:
        """All blobs, and unfinished files that are a day old."""
        for path in sorted(self._directory.glob("*/*")):
            with suppress(FileNotFoundError):  # it has just been deleted, or renamed into place
                status = path.stat()
                if not path.name.startswith(_WRITING_PREFIX):
                    yield BlobFile(path, bytes.fromhex(path.name), status.st_size)
                elif status.st_mtime < time.time() - _WRITING_S:
                    yield BlobFile(path, None, status.st_size)


def _available(path: Path) -> AbstractContextManager[None]:
    return translated(
        OSError,
        StoreUnavailableError,
        lambda error: f"images cannot be stored or read at the moment: {error}; see to {path} and its disk",
    )
