"""SHA-256 of large files, block by block, computed by several threads.

Blocks use all cores, and tell which part of a file is damaged. The digest of a file of one block is what `sha256sum` prints.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 16 * 2**20
"""Changing it changes the format of manifests and fingerprints."""
_READ_BYTES = 2**20
_MAX_THREADS = 16


@dataclass(frozen=True)
class Block:
    """`size` bytes of a file from position `start`."""

    path: Path
    start: int
    size: int


def blocks_of(path: Path, start: int, size: int) -> list[Block]:
    """The blocks of `size` bytes of a file; one empty block if `size` is 0."""
    return [Block(path, start + done, min(BLOCK_BYTES, size - done)) for done in range(0, max(size, 1), BLOCK_BYTES)]


def digests_of(blocks: Sequence[Block]) -> list[str]:
    """SHA-256 of each block in hexadecimal; if the file ends inside a block, of what it has. Raises OSError."""
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
