"""Who may use a server that holds one set of full weights at a time.

Requests for the weights that are there run side by side. One for others waits until those that run have ended, switches, and takes along
all that wait for the same. Nobody who came later overtakes it before.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinsmith.sampling.vllm.tasks import whole

BASE = ""
"""The key of the base's own weights."""
UNKNOWN = None
"""What a server computes with while it switches, and after a switch that failed."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    key: str
    turn: "asyncio.Future[bool]"
    """Done when it may run; whether it has to switch first."""


class Gate:
    """The gate of one server. Used in one event loop."""

    def __init__(self) -> None:
        self.weights: str | None = BASE
        """Key of the weights that are there."""
        self.running = 0
        self.line: deque[_Waiting] = deque()

    @asynccontextmanager
    async def passing(self, key: str, switch: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
        """Run the body while the server holds the weights of that key; `switch` is called if they have to be put there, alone."""
        must_switch = await self._wait(key)
        try:
            if must_switch:
                await whole(self._switch(key, switch))
                for other in [waiting for waiting in self.line if waiting.key == key]:
                    self._let_in(other)
            yield
        finally:
            self._leave()

    def stay(self) -> Callable[[], None]:
        """Keep the weights that are there until what this returns is called. For who is in: what it shares with others may outlast it."""
        assert self.running, "nobody is in"
        self.running += 1
        return self._leave

    async def _switch(self, key: str, switch: Callable[[], Awaitable[None]]) -> None:
        await switch()
        self.weights = key

    async def _wait(self, key: str) -> bool:
        waiting = _Waiting(key, asyncio.get_running_loop().create_future())
        self.line.append(waiting)
        self._move()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self.line:
                self.line.remove(waiting)
                self._move()
            elif not waiting.turn.cancelled():  # it was let in at the same moment
                self._leave()
            raise

    def _move(self) -> None:
        while self.line and (self.line[0].key == self.weights or not self.running):
            self._let_in(self.line[0])

    def _let_in(self, waiting: _Waiting) -> None:
        self.line.remove(waiting)
        if waiting.turn.cancelled():
            return
        must_switch = waiting.key != self.weights
        if must_switch:
            self.weights = UNKNOWN
        self.running += 1
        waiting.turn.set_result(must_switch)

    def _leave(self) -> None:
        self.running -= 1
        self._move()
