"""Files that several processes write together, and the check that all pieces are there.

Each process writes, syncs and tells of its pieces; one that has heard of all compares the files. A file system may lose
bytes that two hosts write into the same page, and a piece that nobody wrote would read as zeros.
"""

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import TinsmithError
from tinsmith.store.digests import Block, of_each, parts_of
from tinsmith.store.disk import opened

LARGEST = 64 * 2**20
"""Larger pieces are cut, for several threads to compare."""

Told = Sequence[tuple[str, int, int, int]]
"""Written pieces: file name, position, size in bytes, and CRC-32."""


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a file from position `start`."""

    file: str
    start: int
    data: memoryview


def write_pieces(
    directory: Path, pieces: Iterable[FilePiece], between_hosts: bool = False
) -> list[tuple[str, int, int, int]]:
    """Write and sync pieces of files while other processes, with `between_hosts` on other hosts, write others.

    Raises OSError.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    told: list[tuple[str, int, int, int]] = []
    files: dict[str, int] = {}
    # A client of NFS extends a write to the whole page if it believes to know that page, and so puts old bytes in the
    # place of those that other hosts have just written; but not in a file that is opened with O_DSYNC.
    flags = os.O_WRONLY | os.O_CREAT | (os.O_DSYNC if between_hosts else 0)
    with ExitStack() as files_open:
        for piece in _cut(pieces):
            if piece.file not in files:
                files[piece.file] = files_open.enter_context(opened(directory / piece.file, flags, 0o600))
            _write(files[piece.file], piece)
            told.append((piece.file, piece.start, len(piece.data), zlib.crc32(piece.data)))
        for file in files.values():
            os.fsync(file)
            if between_hosts:  # what this host has cached around its pieces is older than what others write there
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return told


def check_pieces(directory: Path, told: Told) -> None:
    """Raise TinsmithError unless the files hold every told piece, and nothing else."""
    by_file: dict[str, list[tuple[int, int, int]]] = {}
    for name, start, size, crc in told:
        by_file.setdefault(name, []).append((start, size, crc))
    wanted: list[tuple[Block, int]] = []
    for name, of_file in by_file.items():
        end = 0
        for start, size, crc in sorted(of_file):
            if start != end:
                raise _lost(directory / name, min(start, end), max(start, end))
            end += size
            wanted.append((Block(directory / name, start, size), crc))
        found = _size_of(directory / name)
        if found != end:
            raise _lost(directory / name, min(found, end), max(found, end))
    if others := sorted({path.name for path in directory.iterdir()} - by_file.keys()):
        raise TinsmithError(f"{directory} holds {', '.join(others)}, of which no worker has told; save again")
    if not wanted:
        raise TinsmithError(f"no worker has told of anything that it wrote to {directory}; save again")
    crcs = of_each([block for block, _ in wanted], _crc_of)
    for (block, expected), crc in zip(wanted, crcs, strict=True):
        if crc != expected:
            raise _lost(block.path, block.start, block.start + block.size)


def _lost(path: Path, start: int, end: int) -> TinsmithError:
    return TinsmithError(
        f"{path.name} does not hold what the workers wrote to its bytes {start:,} to {end:,}: "
        f"the file system of {path.parent.parent} does not keep what several processes write into one file; "
        "save again, or give a --checkpoint-root on another file system"
    )


def _cut(pieces: Iterable[FilePiece]) -> Iterator[FilePiece]:
    for piece in pieces:
        for start in range(0, len(piece.data), LARGEST):
            yield FilePiece(piece.file, piece.start + start, piece.data[start : start + LARGEST])


def _write(descriptor: int, piece: FilePiece) -> None:
    done = 0
    while done < len(piece.data):
        done += os.pwrite(descriptor, piece.data[done:], piece.start + done)


def _size_of(path: Path) -> int:
    with path.open("rb") as file:  # a client of NFS asks its server then, and may believe an old size otherwise
        return os.fstat(file.fileno()).st_size


def _crc_of(block: Block) -> int:
    crc = 0
    for part in parts_of(block):
        crc = zlib.crc32(part, crc)
    return crc
