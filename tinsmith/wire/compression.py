"""Request bodies with `Content-Encoding: zstd`, decompressed up to a limit. The sizes that frame headers state are not trusted."""

import zstandard

from tinsmith.errors import UserError

_SLICE_BYTES = 512
"""Bytes given to the decompressor at a time. Four bytes can expand to 128 KiB, so one slice expands to at most 16 MiB."""

_MAX_WINDOW_BYTES = 8 * 2**20
"""Largest window that a frame may ask for, as RFC 9659 limits it for HTTP."""


class TooLargeError(UserError):
    """The data is larger than the limit (HTTP 413)."""


def stated_size(data: bytes) -> int | None:
    """How many bytes the first zstd frame of `data` says that it expands to, which need not be true; None if it does not say."""
    try:
        size = zstandard.frame_content_size(data)
    except zstandard.ZstdError:
        return None
    return None if size < 0 else size


def decompress(data: bytes, max_bytes: int) -> bytes:
    """All zstd frames of `data`. Raises UserError for broken or cut data, TooLargeError for more than `max_bytes` of output."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    parts: list[bytes] = []
    size = 0
    frame = decompressor.decompressobj()
    for start in range(0, len(data), _SLICE_BYTES):
        rest = data[start : start + _SLICE_BYTES]
        while rest:
            if frame.eof:
                frame = decompressor.decompressobj()
            try:
                part = frame.decompress(rest)
            except zstandard.ZstdError as error:
                raise UserError(f"the body is not valid zstd: {error}") from error
            rest = frame.unused_data if frame.eof else b""
            size += len(part)
            if size > max_bytes:
                raise TooLargeError(f"the body is larger than {max_bytes} bytes after decompression; send smaller requests")
            parts.append(part)
    if data and not frame.eof:
        raise UserError("the zstd body ends in the middle of a frame")
    return b"".join(parts)
