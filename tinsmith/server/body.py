"""Request bodies: read up to a limit, decompressed, and kept from blocking the event loop while they are parsed."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from tinsmith.errors import UserError
from tinsmith.wire.compression import TooLargeError, decompress

_INLINE_BYTES = 128 * 1024
"""Bodies up to this size are parsed where they arrive; larger ones in a thread, so that other requests go on."""

Result = TypeVar("Result")


async def read_body(request: Request, max_bytes: int, media_type: str = "application/json") -> bytes:
    """The whole body, decompressed.

    Raises TooLargeError beyond `max_bytes`, UserError for a body that says to be of another type, and for an unknown or broken
    Content-Encoding.
    """
    given = request.headers.get("content-type", media_type)
    if given.partition(";")[0].strip().lower() != media_type:
        raise UserError(f"Content-Type {given!r} is not taken by {request.url.path}; send {media_type}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise UserError(f"Content-Encoding {encoding!r} is not supported; send zstd, or no encoding")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise TooLargeError(f"the body is larger than {max_bytes} bytes (max_body_mib); send smaller requests")
    if encoding == "zstd":
        # Always in a thread: how much comes out does not show in how much went in.
        return await asyncio.to_thread(decompress, bytes(body), max_bytes)
    return bytes(body)


async def parse_aside(size: int, function: Callable[..., Result], *args: object) -> Result:
    """`function(*args)`, in a thread if it works on many bytes."""
    if size <= _INLINE_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
