"""Files to which records are only appended, framed so that damage to one costs no other.

A record is JSON behind a mark, its length and its CRC-32, both 32-bit little-endian. A reader that meets something else
goes on at the next mark. A last record that is cut off was being written when the process died, and is no damage.

Records that are appended are synced upon request alone.
"""

import errno
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tinsmith.store.disk import renamed

_MARK = b"\xf1TR\x01"
"""No JSON in UTF-8 holds the byte 0xF1 before a T."""
_HEADER = struct.Struct("<4sII")


@dataclass(frozen=True)
class Content:
    """The content of a file."""

    records: list[Any]
    damaged: int


class AppendFile:
    """A file of records, for one process."""

    def __init__(self, path: Path, records: Iterable[Any]) -> None:
        """Replace the file by one with these records, in one step. Raises OSError."""
        self._path = path
        self._file = -1
        self.rewrite(records)

    def append(self, record: Any) -> None:
        """Add a record. Raises OSError, and then has changed nothing."""
        content = encode(record)
        written = os.write(self._file, content)
        if written < len(content):  # a disk takes the part that it has room for
            os.ftruncate(self._file, self.size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        self.size += written

    def syncing(self) -> Callable[[], None]:
        """A function, for a thread, that syncs what has been appended until now. It raises OSError."""
        descriptor = os.dup(self._file)

        def sync() -> None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

        return sync

    def rewrite(self, records: Iterable[Any]) -> None:
        """Replace all records. Raises OSError, and then has changed nothing."""
        temporary = self._path.with_suffix(".new")
        content = b"".join(map(encode, records))
        temporary.unlink(missing_ok=True)  # it may be a link
        with renamed(temporary, self._path):
            temporary.write_bytes(content)
            file = os.open(temporary, os.O_WRONLY | os.O_APPEND)
        if self._file >= 0:
            os.close(self._file)
        self._file = file
        self.size = self.rewritten_size = len(content)


def encode(record: Any) -> bytes:
    """A record with its header."""
    body = orjson.dumps(record)
    return _HEADER.pack(_MARK, len(body), zlib.crc32(body)) + body


def read(data: bytes) -> Content:
    """The records in the bytes of a file."""
    records = list[Any]()
    damaged = 0
    for found in _parts(data):
        if found is None:
            damaged += 1
        else:
            records.append(orjson.loads(found))
    return Content(records, damaged)


def _parts(data: bytes) -> Iterator[bytes | None]:
    """The body of each record, and None for what is none."""
    start = 0
    while start < len(data):
        mark, length, checksum = _HEADER.unpack_from(data, start) if start + _HEADER.size <= len(data) else (b"", 0, 0)
        end = start + _HEADER.size + length
        body = data[start + _HEADER.size : end]
        if mark == _MARK and len(body) == length and zlib.crc32(body) == checksum:
            yield body
            start = end
            continue
        following = data.find(_MARK, start + 1)
        if following >= 0 or not _is_cut_off(data[start:], end - start):
            yield None
        start = following if following >= 0 else len(data)


def _is_cut_off(rest: bytes, size: int) -> bool:
    """Whether a file ends inside a record of `size` bytes, header included."""
    return _MARK.startswith(rest[: len(_MARK)]) and (len(rest) < _HEADER.size or len(rest) < size)
