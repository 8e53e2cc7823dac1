"""Files that several processes write together, and the check that all pieces are there.

Each process writes and syncs its pieces and tells of them. One that has heard of all compares the files with that: a file system may lose
bytes that two hosts write into the same page, and a piece that nobody wrote would read as zeros.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import TinsmithError

LARGEST = 64 * 2**20
"""Larger pieces are cut, so that several threads can compare them."""
_READ_BYTES = 2**20
_MAX_THREADS = 16

Told = Sequence[tuple[str, int, int, int]]
"""Written pieces: file name, position, size in bytes, and CRC-32."""


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a file from position `start`."""

    file: str
    start: int
    data: memoryview


def write_pieces(directory: Path, pieces: Iterable[FilePiece], between_hosts: bool = False) -> list[tuple[str, int, int, int]]:
    """Write pieces of files in `directory`, while other processes, with `between_hosts` on other hosts, write others.

    They are on the disk when this returns. Raises OSError.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    told: list[tuple[str, int, int, int]] = []
    files: dict[str, int] = {}
    with ExitStack() as opened:
        for piece in _cut(pieces):
            if piece.file not in files:
                files[piece.file] = opened.enter_context(_opened(directory / piece.file, between_hosts))
            _write(files[piece.file], piece)
            told.append((piece.file, piece.start, len(piece.data), zlib.crc32(piece.data)))
        for file in files.values():
            os.fsync(file)
            if between_hosts:  # what this host has cached around its pieces is older than what others write there
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return told


def check_pieces(directory: Path, told: Told) -> None:
    """Raise TinsmithError unless the files hold every piece that was told of, and nothing else."""
    by_file: dict[str, list[tuple[int, int, int]]] = {}
    for name, start, size, crc in told:
        by_file.setdefault(name, []).append((start, size, crc))
    wanted: list[tuple[Path, int, int, int]] = []
    for name, of_file in by_file.items():
        end = 0
        for start, size, crc in sorted(of_file):
            if start != end:
                raise _lost(directory / name, min(start, end), max(start, end))
            end += size
            wanted.append((directory / name, start, size, crc))
        found = _size_of(directory / name)
        if found != end:
            raise _lost(directory / name, min(found, end), max(found, end))
    if others := sorted({path.name for path in directory.iterdir()} - by_file.keys()):
        raise TinsmithError(f"{directory} holds {', '.join(others)}, of which no worker has told; save again")
    if not wanted:
        raise TinsmithError(f"no worker has told of anything that it wrote to {directory}; save again")
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(wanted))) as threads:
        crcs = list(threads.map(_crc_of, *zip(*[(path, start, size) for path, start, size, _ in wanted], strict=True)))
    for (path, start, size, expected), crc in zip(wanted, crcs, strict=True):
        if crc != expected:
            raise _lost(path, start, start + size)


def _lost(path: Path, start: int, end: int) -> TinsmithError:
    return TinsmithError(
        f"{path.name} does not hold what the workers wrote to its bytes {start:,} to {end:,}: the file system of {path.parent.parent} does "
        "not keep what several processes write into one file; save again, or give a --checkpoint-root on another file system"
    )


def _cut(pieces: Iterable[FilePiece]) -> Iterator[FilePiece]:
    for piece in pieces:
        for start in range(0, len(piece.data), LARGEST):
            yield FilePiece(piece.file, piece.start + start, piece.data[start : start + LARGEST])


@contextmanager
def _opened(path: Path, between_hosts: bool) -> Iterator[int]:
    """A file to write to at any position, which may hold pieces of others."""
    # A client of NFS extends a write to the whole page if it believes to know that page, and so puts old bytes in the place of those that
    # other hosts have just written; but not in a file that is opened like this.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_DSYNC if between_hosts else 0), 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, piece: FilePiece) -> None:
    done = 0
    while done < len(piece.data):
        done += os.pwrite(descriptor, piece.data[done:], piece.start + done)


def _size_of(path: Path) -> int:
    with path.open("rb") as file:  # a client of NFS asks its server then, and may believe an old size otherwise
        return os.fstat(file.fileno()).st_size


def _crc_of(path: Path, start: int, size: int) -> int:
    """CRC-32 of some bytes of a file, or of fewer, if it ends before."""
    crc, left = 0, size
    buffer = memoryview(bytearray(min(_READ_BYTES, size)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            crc = zlib.crc32(buffer[:count], crc)
            left -= count
    return crc
