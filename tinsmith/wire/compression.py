"""zstd of request bodies, and of what is stored of them.

Bodies are decompressed up to a limit, whatever size their frames state.
"""

from contextlib import AbstractContextManager, suppress

import zstandard

from tinsmith.errors import TinsmithError, UserError, translated

_SLICE_BYTES = 512
"""Bytes for the decompressor at a time: four can expand to 128 KiB, so a slice to at most 16 MiB."""

_MAX_BLOCK_BYTES = 2**17 + 64
"""Most bytes of a frame with one block, which comes out whole."""

_MAX_WINDOW_BYTES = 8 * 2**20
"""Largest window of a frame, as in RFC 9659 for HTTP."""


_STORED_PLAIN_BYTES = 64 * 1024
"""Size beyond which stored data is compressed: some megabytes came as kilobytes, and most halve anyway."""

_LEVEL = 1
"""Half a gigabyte a second."""

HEADER_BYTES = 18
"""Most bytes of a frame's header, which states its size."""


class TooLargeError(UserError):
    """The data is larger than the limit (HTTP 413)."""


def stated_size(data: bytes) -> int | None:
    """The size that the first zstd frame states, true or not; None if it states none."""
    with suppress(zstandard.ZstdError):
        size = zstandard.frame_content_size(data)
        return None if size < 0 else size
    return None


def _refusing_broken() -> AbstractContextManager[None]:
    return translated(zstandard.ZstdError, UserError, lambda error: f"the body is not valid zstd: {error}")


def decompress_beginning(data: bytes, max_bytes: int) -> bytes:
    """Up to `max_bytes` of the first frame's content. Raises UserError for broken data."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    with _refusing_broken(), decompressor.stream_reader(data[:_MAX_BLOCK_BYTES]) as reader:
        return reader.read(max_bytes)


def decompress(data: bytes, max_bytes: int) -> bytes:
    """The content of all zstd frames. Raises UserError for broken or cut data, TooLargeError beyond `max_bytes`."""
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
                    raise TooLargeError(
                        f"the body is larger than {max_bytes} bytes after decompression; send smaller requests"
                    )
                parts.append(part)
    if data and not frame.eof:
        raise UserError("the zstd body ends in the middle of a frame")
    return b"".join(parts)


def packed(data: bytes) -> bytes:
    """The stored form of `data`: itself if it is small, else a zstd frame that states its size."""
    if len(data) <= _STORED_PLAIN_BYTES and not data.startswith(zstandard.FRAME_HEADER):
        return data
    return zstandard.compress(data, _LEVEL)


def unpacked_size(stored: bytes, length: int) -> int:
    """The size of what `packed` made `length` bytes of; `stored` are the first `HEADER_BYTES` of them, or more."""
    return zstandard.frame_content_size(stored) if stored.startswith(zstandard.FRAME_HEADER) else length


def unpacked(stored: bytes) -> bytes:
    """The inverse of `packed`. Raises TinsmithError for damaged data."""
    if not stored.startswith(zstandard.FRAME_HEADER):
        return stored
    with translated(
        zstandard.ZstdError, TinsmithError, lambda error: f"an operation's data in the database is damaged: {error}"
    ):
        return zstandard.decompress(stored)
