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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tinsmith.store.disk import sync

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
        self._new = path.with_suffix(".new")
        self._file = -1
        self._behind = bytearray()
        """What was appended since `rewriting`."""
        self._is_named = False
        """Whether the file's name survives a power cut."""
        self.rewriting(records)()
        self.switch()
        sync(path.parent)
        self._is_named = True

    def append(self, record: Any) -> None:
        """Add a record. Raises OSError, and then has changed nothing."""
        content = encode(record)
        try:
            _write_all(self._file, content, self._path)
        except OSError:
            os.ftruncate(self._file, self.size)
            raise
        self.size += len(content)
        self._behind += content

    def syncing(self) -> Callable[[], None]:
        """A function, for a thread, that syncs what has been appended until now. It raises OSError.

        It has to end before `switch` is called.
        """
        descriptor = os.dup(self._file)

        def synced() -> None:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if not self._is_named:
                sync(self._path.parent)
                self._is_named = True

        return synced

    def rewriting(self, records: Iterable[Any]) -> Callable[[], None]:
        """A function, for a thread, that writes these records to a new file. It raises OSError. Then call `switch`."""
        content = b"".join(map(encode, records))
        self._behind.clear()

        def write() -> None:
            self._new.unlink(missing_ok=True)  # it may be a link
            with ExitStack() as undo:
                undo.callback(self._new.unlink, missing_ok=True)
                self._new.write_bytes(content)
                sync(self._new)
                undo.pop_all()

        return write

    def switch(self) -> None:
        """Replace all records by those of `rewriting` and what was appended since.

        Raises OSError, and then has changed nothing.
        """
        with ExitStack() as undo:
            file = os.open(self._new, os.O_WRONLY | os.O_APPEND)
            undo.callback(os.close, file)
            undo.callback(self._new.unlink)
            _write_all(file, self._behind, self._new)
            self._new.rename(self._path)
            undo.pop_all()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._is_named = file, False
        self.size = self.rewritten_size = os.fstat(file).st_size


def _write_all(file: int, content: bytes | bytearray, path: Path) -> None:
    """Raise OSError if a disk takes a part only, for which it has room."""
    if os.write(file, content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


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
