"""HTTP with one vLLM server. What it refuses and what it loses are two different errors: only the second is worth sending again."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import aiohttp
import orjson

from tinsmith.errors import TinsmithError, UserError

_CONNECT_S = 10.0
_SOCKET_PREFIX = "unix:"
_LONGEST_MESSAGE = 2000
"""Characters of a server's error that are passed on."""
_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"
_READ_BUFFER = 2**22
"""Bytes. A line that is longer is an error, and an event with the likeliest tokens is a line of some hundred kilobytes."""


class ServerLostError(TinsmithError):
    """The server went away before it answered: the request can go to another one."""


class RefusedError(UserError):
    """The server answered with HTTP 4xx; the message is its own."""


class ServerFailedError(TinsmithError):
    """The server answered with HTTP 5xx, or with an error in the middle of a stream; the message is its own."""


class Connection:
    """A pool of connections to one server. Made and used in one event loop."""

    def __init__(self, url: str) -> None:
        """`url` is one of HTTP, or `unix:` and the path of a socket."""
        self.url = url
        in_file = url.startswith(_SOCKET_PREFIX)
        connector = aiohttp.UnixConnector(url.removeprefix(_SOCKET_PREFIX), limit=0) if in_file else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            base_url="http://vllm" if in_file else url,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            read_bufsize=_READ_BUFFER,
        )

    async def get(self, path: str) -> Any:
        """The JSON answer, None for an empty one. Raises as `post`."""
        async with self._reply("GET", path, None, {}) as reply:
            return _json(await reply.read())

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """The JSON answer, None for an empty one. Raises ServerLostError, RefusedError or ServerFailedError.

        Each has a connection of its own: vLLM closes one on which it failed a moment after its answer, and the next request would be lost.
        """
        async with self._reply("POST", path, None if body is None else orjson.dumps(body), query, {"Connection": "close"}) as reply:
            return _json(await reply.read())

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The JSON objects of an answer that is a stream of server-sent events, as they come. Raises as `post`."""
        async with self._reply("POST", path, orjson.dumps(body), {}) as reply:
            async for line in reply.content:
                event = line.strip().removeprefix(_EVENT)
                if event == _LAST_EVENT:
                    return
                if event:
                    answer = orjson.loads(event)
                    if "error" in answer:
                        raise ServerFailedError(f"vLLM failed while it answered {path}: {_message(event)}")
                    yield answer
            raise ServerLostError(f"the vLLM server at {self.url} ended an answer before it was whole")

    async def close(self) -> None:
        """Close all connections; what is under way on them is lost."""
        await self._session.close()

    @asynccontextmanager
    async def _reply(
        self, method: str, path: str, body: bytes | None, query: Mapping[str, str], headers: Mapping[str, str] = MappingProxyType({})
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply of status 2xx, to be read in the body, where a connection that breaks is a ServerLostError too."""
        if self._session.closed:
            raise ServerLostError(f"the vLLM server at {self.url} went away before it was asked")
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with self._session.request(method, path, data=body, params=query, headers=headers) as reply:
                if reply.status >= 400:
                    kind = RefusedError if reply.status < 500 else ServerFailedError
                    raise kind(f"vLLM answered {reply.status} to {path}: {_message(await reply.read())}")
                yield reply
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"the vLLM server at {self.url} went away: {error!r}") from error


def _json(content: bytes) -> Any:
    """Some answers are plain texts, which say no more than the status does."""
    return orjson.loads(content) if content[:1] in (b"{", b"[") else None


def _message(content: bytes) -> str:
    try:
        error = orjson.loads(content)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):  # an answer that is no error of vLLM's own
        text = content.decode(errors="replace")
    return str(text)[:_LONGEST_MESSAGE]
