"""Calls from an HTTP server to the hub in its parent process, over a socket that both inherit.

Each is a function, its arguments and a number, pickled; the answer is that number with the result or the error. Calls
are answered as they end, in any order. The two ends are processes of one program and one user.
"""

import asyncio
import itertools
import logging
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from tinsmith.errors import TinsmithError
from tinsmith.server.calls import WAITS
from tinsmith.server.hub import Hub

log = logging.getLogger(__name__)

Params = ParamSpec("Params")
Result = TypeVar("Result")

_SIZE = struct.Struct("!Q")
"""Bytes of the pickled message that follows."""


class _Frames(asyncio.Protocol):
    """One end of the socket: whole messages, both ways."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        """Give each message that arrives to `take`."""
        self._take = take
        self._arrived = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self.lost = asyncio.Event()
        """Whether the other end has closed, or ended."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are not of its class

    def data_received(self, data: bytes) -> None:
        """Take in what has arrived."""
        arrived = self._arrived
        arrived += data
        begin = 0
        while len(arrived) - begin >= _SIZE.size:
            end = begin + _SIZE.size + _SIZE.unpack_from(arrived, begin)[0]
            if len(arrived) < end:
                break
            with memoryview(arrived) as view:
                message = pickle.loads(view[begin + _SIZE.size : end])
            begin = end
            self._take(message)
        del arrived[:begin]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end."""
        self.lost.set()

    def send(self, message: Any) -> None:
        """Queue a message; to an end that is lost it is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.writelines([_SIZE.pack(len(content)), content])

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class HubAtDistance:
    """The hub, for a process that does not have it: an `Ask`."""

    def __init__(self) -> None:
        self._frames = _Frames(self._take)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    @property
    def lost(self) -> asyncio.Event:
        """Whether the hub has ended."""
        return self._frames.lost

    async def connect(self, ours: socket.socket) -> None:
        """Begin, with our end of the socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._frames, sock=ours)

    async def __call__(
        self,
        function: Callable[Concatenate[Hub, Params], Awaitable[Result]],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Result:
        """`function(hub, ...)`, computed where the hub is. Raises what that raises; waits for ever once it is lost."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._frames.send((number, function, args, kwargs))
            result: Result = await answer
        finally:
            del self._waiting[number]
        return result

    def _take(self, answer: tuple[int, Any, TinsmithError | None]) -> None:
        number, result, error = answer
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return  # its request was given up
        if error is None:
            waiting.set_result(result)
        else:
            waiting.set_exception(error)


class HubAnswers:
    """The end of the hub: answers the calls of one HTTP server."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._frames = _Frames(self._take)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waits: set[asyncio.Task[None]] = set()
        self.heard = False
        """Whether a call came since this was last set to False."""

    async def connect(self, ours: socket.socket) -> None:
        """Begin, with our end of the socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self._frames, sock=ours)

    def close(self) -> None:
        """Answer nothing more. What was asked before is still done, but for what only waits."""
        self._frames.close()
        for waiting in self._waits:
            waiting.cancel()

    def _take(self, call: tuple[int, Callable[..., Awaitable[Any]], tuple[Any, ...], dict[str, Any]]) -> None:
        self.heard = True
        task = asyncio.create_task(self._answer(*call))
        kept = self._waits if call[1] in WAITS else self._tasks
        kept.add(task)
        task.add_done_callback(kept.discard)

    async def _answer(
        self, number: int, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        try:
            self._frames.send((number, await function(self._hub, *args, **kwargs), None))
        except TinsmithError as error:
            self._frames.send((number, None, error))
        except Exception as error:
            log.exception("a call of an HTTP server could not be answered")
            told = f"internal error of the server: {type(error).__name__}; see its log"
            self._frames.send((number, None, TinsmithError(told)))
