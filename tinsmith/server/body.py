"""Request bodies: read up to a limit, decompressed, and kept from blocking the event loop while they are parsed."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastapi import Request

from tinsmith.errors import UserError
from tinsmith.wire.compression import TooLargeError, decompress

_INLINE_BYTES = 16 * 1024
"""Bodies up to this size are decoded where they arrive, which takes milliseconds at worst; larger ones in a thread, so that other requests
go on."""

_DECODERS = ThreadPoolExecutor(2, "decoder")
"""Where large bodies are decoded. Few at a time: each takes memory, and all share the interpreter's lock with the event loop."""

Result = TypeVar("Result")


async def read_body(request: Request, max_bytes: int, setting: str | None = None) -> bytes:
    """The whole JSON body, decompressed.

    Raises TooLargeError beyond `max_bytes`, which `setting` allows if there is one for it; UserError for a body that says to be of another
    type, and for an unknown or broken Content-Encoding.
    """
    return await read_parsed(request, max_bytes, setting, "application/json", bytes)


async def read_parsed(
    request: Request, max_bytes: int, setting: str | None, media_type: str, parse: Callable[..., Result], *args: object
) -> Result:
    """`parse(body, *args)` of the whole body, decompressed; in a thread if there may be much to do.

    Decompressing and parsing are one job: of many compressed bodies that come at once, only as many are unpacked as are being parsed.
    Raises as `read_body` and `parse` do.
    """
    given = request.headers.get("content-type", media_type)
    if given.partition(";")[0].strip().lower() != media_type:
        raise UserError(f"Content-Type {given!r} is not taken by {request.url.path}; send {media_type}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise UserError(f"Content-Encoding {encoding!r} is not supported; send zstd, or no encoding")
    body = await _received(request, max_bytes, setting)
    if encoding == "identity" and len(body) <= _INLINE_BYTES:
        return parse(body, *args)

    def decode() -> Result:
        return parse(decompress(body, max_bytes) if encoding == "zstd" else body, *args)

    return await asyncio.get_running_loop().run_in_executor(_DECODERS, decode)


async def _received(request: Request, max_bytes: int, setting: str | None) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise TooLargeError(f"the body is larger than {max_bytes} bytes{f' ({setting})' if setting else ''}; send smaller requests")
    return b"".join(parts)
