"""SHA-256 of large files, in blocks that threads compute side by side.

One SHA-256 over a file keeps one core busy, at 1 to 2 GB/s. Digests of blocks use all cores, and say which part of a file is damaged. A
file of at most one block has one digest, which is what `sha256sum` prints.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 16 * 2**20
"""Bytes of a block; the last one of a file may be shorter. Manifests and fingerprints depend on it: another value is another format."""
_READ_BYTES = 2**20
_MAX_THREADS = 16


@dataclass(frozen=True)
class Block:
    """Bytes of a file: `size` of them from `start`."""

    path: Path
    start: int
    size: int


def blocks_of(path: Path, start: int, size: int) -> list[Block]:
    """`size` bytes of a file from `start`, in blocks. No bytes at all are one empty block."""
    return [Block(path, start + done, min(BLOCK_BYTES, size - done)) for done in range(0, max(size, 1), BLOCK_BYTES)]


def digests_of(blocks: Sequence[Block]) -> list[str]:
    """SHA-256 of each block in hexadecimal, in order. A file that ends early gives the digest of what there is. Raises OSError."""
    if len(blocks) < 2:
        return [_digest_of(block) for block in blocks]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1, len(blocks))) as threads:
        return list(threads.map(_digest_of, blocks))


def _digest_of(block: Block) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_READ_BYTES, block.size)))
    with block.path.open("rb", buffering=0) as file:
        file.seek(block.start)
        left = block.size
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
