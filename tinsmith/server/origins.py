"""Refuses requests of web pages, which could otherwise use a server on the browser's machine or network.

A page of another site sends its own address as Origin. One whose name was made to point here (DNS rebinding) sends that name as Host: a
name must be one of this server's, and an address of numbers cannot be made to point elsewhere.
"""

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.server.replies import json_reply


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
            return f"Host {address[:300]!r} is not a name of this server; call it by its address, or allow it with --allowed-host"
        if origin is None:
            return ""
        page = origin.decode("latin-1").lower()
        if page.partition("://")[2] == address or _name_of(page) in self.allowed:
            return ""
        return f"Origin {page[:300]!r} is not this server: pages of other sites may not use it; allow their host with --allowed-host"


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
