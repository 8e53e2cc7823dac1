"""Request bodies: read up to a limit, decompressed, and parsed where that keeps no other request waiting."""

import asyncio
import contextlib
import io
import re
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import Request

from tinsmith.errors import UserError
from tinsmith.server.parser_process import ParserProcess
from tinsmith.server.tenants import Caller
from tinsmith.wire.compression import TooLargeError, decompress, decompress_beginning, stated_size

SMALL_BYTES = 16 * 1024
"""Bodies up to this size are parsed on the event loop, in milliseconds at worst."""

_PARTS_AT_A_TIME = 2
"""Large bodies that are read from in one iteration of the event loop: up to 256 KiB each, a millisecond.

More would keep small requests waiting, each of which takes several iterations.
"""

_END_BYTES = 2048
"""Bytes at each end of a body that are searched for its session."""
_OWNED_ID = re.compile(rb"([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}):(?:train|sample):[0-9]")

Result = TypeVar("Result")


async def read_body(request: Request, max_bytes: int, setting: str | None = None) -> bytes:
    """The whole JSON body, decompressed; for routes of small bodies.

    Raises TooLargeError beyond `max_bytes`, which `setting` may name; UserError for another Content-Type or a bad
    Content-Encoding.
    """
    encoding = _encoding(request, "application/json")
    body = await _received(request, max_bytes, setting)
    return body if encoding == "identity" else await asyncio.to_thread(decompress, body, max_bytes)


async def read_form(request: Request, max_bytes: int) -> bytes:
    """The body of a form that a browser has sent. Raises TooLargeError, or UserError for another Content-Type."""
    _encoding(request, "application/x-www-form-urlencoded")
    return await _received(request, max_bytes, None)


async def drop_body(request: Request, max_bytes: int) -> None:
    """Receive a JSON body that nobody needs. Raises as `read_body`."""
    _encoding(request, "application/json")
    await _received(request, max_bytes, None)


class LargeBodies:
    """Reads bodies of megabytes, many at once, without keeping small requests waiting."""

    def __init__(self, is_session: Callable[[str], bool] = bool, log_format: str = "text") -> None:
        """Make it in the event loop's thread. `is_session` tells real session ids: made-up ones share one turn."""
        self.parser = ParserProcess(log_format)
        self._is_session = is_session
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Bodies waiting to be read on, the longest waiting first."""

    async def read_parsed(
        self,
        request: Request,
        max_bytes: int,
        setting: str | None,
        media_type: str,
        parse: Callable[..., Result],
        *args: object,
    ) -> Result:
        """`parse(body, *args)` of the whole body, decompressed; large ones by `ParserProcess.run`, clients in turn.

        A client is a tenant; without keys an address, behind a proxy here the last in X-Forwarded-For. Raises as
        `read_body`, `parse` and `ParserProcess.run`.
        """
        encoding = _encoding(request, media_type)
        body = await _received(request, max_bytes, setting, self._turn)
        plain = _small(body, encoding)
        if plain is not None:
            return parse(plain, *args)
        session = _session_of(body, encoding)
        known, client = session if self._is_session(session) else "", _client_of(request)
        return await self.parser.run(parse, body, encoding, max_bytes, *args, client=client, session=known)

    async def parse_made(self, request: Request, body: bytes, parse: Callable[..., Result], *args: object) -> Result:
        """`parse(body, *args)` of a body that a route has made of its client's. Raises as `read_parsed`."""
        if len(body) <= SMALL_BYTES:
            return parse(body, *args)
        return await self.parser.run(parse, body, "identity", len(body), *args, client=_client_of(request))

    async def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._give_turns)
        self._waiting.append(turn)
        await turn

    def _give_turns(self) -> None:
        """Run once in each iteration of the event loop while bodies wait."""
        for _ in range(min(_PARTS_AT_A_TIME, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have gone away
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._give_turns)


def _client_of(request: Request) -> str:
    caller: Caller = request.state.caller
    address = request.client.host if request.client else ""
    return address if caller.key is None else f"tenant {caller.tenant}"


def _small(body: bytes, encoding: str) -> bytes | None:
    """The decompressed body; None if it is not small, or may not be."""
    if len(body) > SMALL_BYTES:
        return None
    if encoding == "identity":
        return body
    size = stated_size(body)
    if size is None or size > SMALL_BYTES:
        return None
    with contextlib.suppress(TooLargeError):  # it is larger than its first frame says
        return decompress(body, SMALL_BYTES)
    return None


def _session_of(body: bytes, encoding: str) -> str:
    """The session whose id stands where the SDK writes it: near the start in protobuf, the end in JSON; else ''."""
    ends = [body[:_END_BYTES], body[-_END_BYTES:]]
    if encoding == "zstd":
        with contextlib.suppress(UserError):  # more is wrong with it than that
            ends = [decompress_beginning(body, _END_BYTES)]
    found = next((match for match in map(_OWNED_ID.search, ends) if match), None)
    return found[1].decode() if found else ""


def _encoding(request: Request, media_type: str) -> str:
    """Identity or zstd. Raises UserError for another Content-Encoding or Content-Type."""
    headers = request.headers
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    given = headers.get("content-type", "" if has_body else media_type)
    if given.partition(";")[0].strip().lower() != media_type:
        raise UserError(f"Content-Type {given!r} is not taken by {request.url.path}; send {media_type}")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "zstd"):
        raise UserError(f"Content-Encoding {encoding!r} is not supported; send zstd, or no encoding")
    return encoding


async def _received(
    request: Request, max_bytes: int, setting: str | None, turn: Callable[[], Awaitable[None]] | None = None
) -> bytes:
    """The body as it was sent; beyond `SMALL_BYTES` each part waits for `turn`.

    BytesIO grows in place and gives out its own buffer; joining a list would stop the loop while megabytes are copied.
    """
    received = io.BytesIO()
    async for part in request.stream():
        received.write(part)
        if received.tell() > max_bytes:
            raise TooLargeError(
                f"the body is larger than {max_bytes} bytes{f' ({setting})' if setting else ''}; send smaller requests"
            )
        if turn is not None and received.tell() > SMALL_BYTES:
            await turn()  # until then the connection is not read from
    return received.getvalue()
