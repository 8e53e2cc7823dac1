"""HTTP with one vLLM server. What it refuses and what it loses are two different errors: only the second is worth sending again."""

from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from tinsmith.errors import TinsmithError, UserError

_CONNECT_S = 10.0
_SOCKET_PREFIX = "unix:"
_LONGEST_MESSAGE = 2000
"""Characters of a server's error that are passed on."""


class ServerLostError(TinsmithError):
    """The server went away before it answered: the request can go to another one."""


class RefusedError(UserError):
    """The server answered with HTTP 4xx; the message is its own."""


class ServerFailedError(TinsmithError):
    """The server answered with HTTP 5xx; the message is its own."""


class Connection:
    """A pool of connections to one server. Made and used in one event loop."""

    def __init__(self, address: str) -> None:
        """`address` is a URL, or `unix:` and the path of a socket."""
        self.address = address
        in_file = address.startswith(_SOCKET_PREFIX)
        connector = aiohttp.UnixConnector(address.removeprefix(_SOCKET_PREFIX), limit=0) if in_file else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            base_url="http://vllm" if in_file else address,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def get(self, path: str) -> Any:
        """The JSON answer, None for an empty one. Raises as `post`."""
        return await self._answer("GET", path, None, {})

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """The JSON answer, None for an empty one. Raises ServerLostError, RefusedError or ServerFailedError."""
        return await self._answer("POST", path, None if body is None else orjson.dumps(body), query)

    async def close(self) -> None:
        """Close all connections; what is under way on them is lost."""
        await self._session.close()

    async def _answer(self, method: str, path: str, body: bytes | None, query: Mapping[str, str]) -> Any:
        if self._session.closed:
            raise ServerLostError(f"the vLLM server at {self.address} went away before it was asked")
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.request(method, path, data=body, params=query, headers=headers) as reply:
                content, status = await reply.read(), reply.status
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"the vLLM server at {self.address} went away: {error!r}") from error
        if status >= 400:
            kind = RefusedError if status < 500 else ServerFailedError
            raise kind(f"vLLM answered {status} to {path}: {_message(content)}")
        return _json(content)


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
