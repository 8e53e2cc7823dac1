"""SHA-256 of large files, block by block: several threads share the work, and damage is located.

The digest of a file of one block is what `sha256sum` prints.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

BLOCK_BYTES = 16 * 2**20
"""Changing it changes the format of manifests and fingerprints."""
_READ_BYTES = 2**20
MAX_THREADS = 16


@dataclass(frozen=True)
class Block:
    """`size` bytes of a file from position `start`."""

    path: Path
    start: int
    size: int


def blocks_of(path: Path, start: int, size: int) -> list[Block]:
    """The blocks of `size` bytes of a file; one empty block if `size` is 0."""
    return [Block(path, start + done, min(BLOCK_BYTES, size - done)) for done in range(0, max(size, 1), BLOCK_BYTES)]


def digests_of(blocks: Sequence[Block], most_threads: int = MAX_THREADS) -> list[str]:
    """SHA-256 of each block in hexadecimal; of what there is, if the file ends before. Raises OSError."""
    return of_each(blocks, _digest_of, most_threads)


def of_each(blocks: Sequence[Block], function: Callable[[Block], T], most_threads: int = MAX_THREADS) -> list[T]:
    """Results of a function of each block, by several threads."""
    if len(blocks) < 2 or most_threads == 1:
        return list(map(function, blocks))
    with ThreadPoolExecutor(min(most_threads, os.cpu_count() or 1, len(blocks))) as threads:
        return list(threads.map(function, blocks))


def parts_of(block: Block) -> Iterator[memoryview]:
    """The bytes of a block, or fewer if the file ends before; each part is valid until the next."""
    left = block.size
    buffer = memoryview(bytearray(min(_READ_BYTES, left)))
    with block.path.open("rb", buffering=0) as file:
        file.seek(block.start)
        while left and (count := file.readinto(buffer[: min(left, _READ_BYTES)])):
            yield buffer[:count]
            left -= count


def _digest_of(block: Block) -> str:
    digest = hashlib.sha256()
    for part in parts_of(block):
        digest.update(part)
    return digest.hexdigest()
