"""The sequences that one server may compute side by side, and who waits for room among them."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """One for each sequence. Used in one event loop."""

    def __init__(self, count: int) -> None:
        self.free = count
        self.line: deque[asyncio.Future[None]] = deque()
        """Each waits for one slot, in order of arrival."""

    @asynccontextmanager
    async def some(self, at_most: int) -> AsyncIterator[int]:
        """Hold slots while the body runs; how many is said to it.

        That is `at_most`, as far as there are so many, if nobody waits. Else it is one, because several are given back together, when the
        longest of their sequences has ended, and until then those who wait could have used the others.
        """
        count = await self._take(at_most)
        try:
            yield count
        finally:
            self._give_back(count)

    async def _take(self, at_most: int) -> int:
        if self.free and not self.line:
            count = min(self.free, at_most)
            self.free -= count
            return count
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it got a slot at the same moment
                self._give_back(1)
            raise
        return 1

    def _give_back(self, count: int) -> None:
        self.free += count
        while self.free and self.line:
            turn = self.line.popleft()
            if not turn.cancelled():
                self.free -= 1
                turn.set_result(None)
