"""HTTP/1.1: uvicorn's httptools protocol with limits on headers and waiting; and which web pages may use it.

uvicorn closes only connections that are idle behind a reply; with half a header or body they would stay for ever. And
httptools joins the pieces of a header again and again: 100 MB of one would stop the event loop for 20 seconds.
uvicorn's `h11_max_incomplete_event_size` is for h11 only.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tinsmith.server.replies import json_reply

log = logging.getLogger(__name__)

_PIECE_BYTES = 16 * 1024
"""Bytes that are parsed before the limit is checked again."""

_BODY_BYTES_PER_S = 4096
"""Least rate of a body over each `idle_s`, a tenth of what phones upload."""

_MANY_PARTS, _PART_BYTES = 1024, 60
"""A body of more parts needs so many bytes in each, on average: a part costs as much as some kilobytes.

A read may cut one of 64 in two.
"""

_LINGER_S = 2.0
"""Seconds that a refused connection stays open, so that the client can read the reason."""


class BoundedHttp(HttpToolsProtocol):
    """The protocol with limits. That of headers covers trailers and chunk extensions too."""

    max_header_kib = 64
    idle_s = 75.0
    """Seconds for a whole header, and for as much of a body as `_BODY_BYTES_PER_S` allows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.outside_body = 0
        """Bytes since the last part of a body, or the end of the last header."""
        self.in_body = False
        self.came = 0
        """Bytes of the body since `waiting_since`."""
        self.is_chunked = False
        self.parts = self.part_bytes = 0
        """Parts of the body that have come, and their bytes."""
        self.refused = False
        self.waiting_since = 0.0
        """The loop's time since which the client has owed us what comes next, if it does."""
        self.look_again: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait."""
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self.look_again is not None:
            self.look_again.cancel()

    def _look(self) -> None:
        """Close the connection if its client has owed us something for too long; else look again later."""
        now = self.loop.time()
        if self.flow.read_paused:
            self.waiting_since = now + self.idle_s  # it is we who wait; afterwards the client gets its time
        owes = self.in_body or self.cycle is None or self.cycle.response_complete
        if owes and now - self.waiting_since >= self.idle_s:
            self.transport.close()
        else:
            left = self.waiting_since + self.idle_s - now if owes else self.idle_s
            self.look_again = self.loop.call_later(min(self.idle_s, left), self._look)

    def on_message_begin(self) -> None:
        """Await a header."""
        super().on_message_begin()
        self.waiting_since = self.loop.time()

    def on_response_complete(self) -> None:
        """Await the next request."""
        super().on_response_complete()
        self.waiting_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; headers and chunked bodies in pieces, up to the limit."""
        size = len(data) if self.in_body and not self.is_chunked else _PIECE_BYTES
        for start in range(0, len(data), size):
            if self.refused or self.transport.is_closing():
                return
            piece = data[start : start + size]
            self.outside_body += len(piece)
            super().data_received(piece)
            if self.outside_body > self.max_header_kib * 1024:
                self._refuse()

    def on_headers_complete(self) -> None:
        """Begin to count the body."""
        super().on_headers_complete()
        self.outside_body = self.came = self.parts = self.part_bytes = 0
        self.in_body = True
        self.is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self.waiting_since = self.loop.time()

    def on_body(self, body: bytes) -> None:
        """Refuse a body in too many small parts; they cost far more than their bytes."""
        self.parts += 1
        self.part_bytes += len(body)
        if self.refused or (
            self.is_chunked and self.parts > _MANY_PARTS and self.part_bytes < self.parts * _PART_BYTES
        ):
            if not self.refused:
                log.warning(
                    "a body in chunks of %d bytes was not read: send larger ones, or Content-Length",
                    self.part_bytes // self.parts,
                )
            self.refused = True
            self.transport.close()
            return
        super().on_body(body)
        self.outside_body = 0
        self.came += len(body)
        if self.flow.read_paused or self.came >= _BODY_BYTES_PER_S * self.idle_s:
            self.came = 0
            # Or `_look` may miss a pause
            self.waiting_since = self.loop.time() + (self.idle_s if self.flow.read_paused else 0.0)

    def on_message_complete(self) -> None:
        """Await the next request. A refused one never becomes complete."""
        if self.refused:
            return
        super().on_message_complete()
        self.outside_body = 0
        self.in_body = False

    def _refuse(self) -> None:
        self.refused = True
        # In a body's trailer: its reply may be on its way
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        reply = json_reply(
            {
                "detail": (
                    f"the request's header is longer than {self.max_header_kib} KiB (max_header_kib); "
                    "send a shorter one"
                )
            },
            431,
        )
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in reply.raw_headers)
        self.transport.write(head + fields + b"\r\n" + bytes(reply.body))
        self.loop.call_later(_LINGER_S, self.transport.close)


def http_protocol(max_header_kib: int, idle_s: float) -> type[BoundedHttp]:
    """The protocol class for uvicorn, with these limits."""
    return type("LimitedHttp", (BoundedHttp,), {"max_header_kib": max_header_kib, "idle_s": idle_s})


# Refuses requests of web pages, which could otherwise use a server on the browser's machine or network.
#
# A page of another site sends its own address as Origin. One whose name was made to point here (DNS rebinding) sends
# that name as Host: a name must be one of this server's, and an address of numbers cannot be made to point elsewhere.


class Origins:
    """An ASGI application in front of another; it refuses web pages of other sites (HTTP 403)."""

    def __init__(self, app: ASGIApp, listens_on: str, allowed_hosts: Iterable[str]) -> None:
        """`listens_on` is the server's address; `allowed_hosts` are further names that lead to it."""
        self.app = app
        self.allowed = {name.lower() for name in allowed_hosts}
        self.names = {"localhost", socket.gethostname().lower(), listens_on.lower(), *self.allowed}
        self.refusal = lru_cache(1024)(self._refusal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        host = origin = None
        for name, value in scope["headers"]:
            if name == b"host":
                host = value
            elif name == b"origin":
                origin = value
        refusal = self.refusal(host, origin)
        if refusal:
            return await json_reply({"detail": refusal}, 403)(scope, receive, send)
        return await self.app(scope, receive, send)

    def _refusal(self, host: bytes | None, origin: bytes | None) -> str:
        """The reason why a request with these headers is refused, or empty."""
        address = "" if host is None else host.decode("latin-1").lower()
        name = _name_of(f"//{address}")
        if host is not None and name not in self.names and not _is_address(name):
            return (
                f"Host {address[:300]!r} is not a name of this server; call it by its address, "
                "or allow it with --allowed-host"
            )
        if origin is None:
            return ""
        page = origin.decode("latin-1").lower()
        if page.partition("://")[2] == address or _name_of(page) in self.allowed:
            return ""
        return (
            f"Origin {page[:300]!r} is not this server: pages of other sites may not use it; "
            "allow their host with --allowed-host"
        )


def _name_of(url: str) -> str:
    """The host's name without port, or empty."""
    with suppress(ValueError):
        return urlsplit(url).hostname or ""
    return ""


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False
