"""zstd of request bodies, and of what is stored of them.

Bodies are decompressed up to a limit, and the sizes that their frames state are not trusted. What is large is stored compressed, by us.
"""

from contextlib import AbstractContextManager, suppress

import zstandard

from tinsmith.errors import TinsmithError, UserError, translated

_SLICE_BYTES = 512
"""Bytes given to the decompressor at a time. Four bytes can expand to 128 KiB, so one slice expands to at most 16 MiB."""

_MAX_BLOCK_BYTES = 2**17 + 64
"""Most bytes of a frame with one block, which comes out whole or not at all."""

_MAX_WINDOW_BYTES = 8 * 2**20
"""Largest window that a frame may ask for, as RFC 9659 limits it for HTTP."""


_STORED_PLAIN_BYTES = 64 * 1024
"""Size beyond which stored data is compressed: kilobytes may have come as hundreds of megabytes, and mostly halve anyway."""

_LEVEL = 1
"""Level of compression: half a gigabyte a second."""

HEADER_BYTES = 18
"""Most bytes of a frame's header, which says how much is in it."""


class TooLargeError(UserError):
    """The data is larger than the limit (HTTP 413)."""


def stated_size(data: bytes) -> int | None:
    """Return the size to which the first zstd frame of `data` says that it expands, true or not; None if it does not say."""
    with suppress(zstandard.ZstdError):
        size = zstandard.frame_content_size(data)
        return None if size < 0 else size
    return None


def _refusing_broken() -> AbstractContextManager[None]:
    return translated(zstandard.ZstdError, UserError, lambda error: f"the body is not valid zstd: {error}")


def decompress_beginning(data: bytes, max_bytes: int) -> bytes:
    """Up to `max_bytes` of what the first frame of `data` expands to. Raises UserError for broken data."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    with _refusing_broken(), decompressor.stream_reader(data[:_MAX_BLOCK_BYTES]) as reader:
        return reader.read(max_bytes)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """All zstd frames of `data`. Raises UserError for broken or cut data, TooLargeError for more than `max_bytes` of output."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    parts: list[bytes] = []
    size = 0
    frame = decompressor.decompressobj()
    with _refusing_broken():
        for start in range(0, len(data), _SLICE_BYTES):
            rest = data[start : start + _SLICE_BYTES]
            while rest:
                if frame.eof:
                    frame = decompressor.decompressobj()
                part = frame.decompress(rest)
                rest = frame.unused_data if frame.eof else b""
                size += len(part)
                if size > max_bytes:
                    raise TooLargeError(f"the body is larger than {max_bytes} bytes after decompression; send smaller requests")
                parts.append(part)
    if data and not frame.eof:
        raise UserError("the zstd body ends in the middle of a frame")
    return b"".join(parts)


def packed(data: bytes) -> bytes:
    """Return the stored form of `data`: itself if it is small, else one zstd frame that states its size."""
    if len(data) <= _STORED_PLAIN_BYTES and not data.startswith(zstandard.FRAME_HEADER):
        return data
    return zstandard.compress(data, _LEVEL)


def unpacked_size(stored: bytes, length: int) -> int:
    """The size of what `packed` made `length` bytes of, which begin with `stored`: with `HEADER_BYTES` of them, if there are so many."""
    return zstandard.frame_content_size(stored) if stored.startswith(zstandard.FRAME_HEADER) else length


def unpacked(stored: bytes) -> bytes:
    """Return the input of `packed`. Raises TinsmithError if it is damaged."""
    if not stored.startswith(zstandard.FRAME_HEADER):
        return stored
    with translated(zstandard.ZstdError, TinsmithError, lambda error: f"an operation's data in the database is damaged: {error}"):
        return zstandard.decompress(stored)
