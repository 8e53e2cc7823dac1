"""Long polls that wait for a request id, and how they learn what became of it.

What the engine reports reaches the polls with its result, so they need not look it up. The store stays what counts: a poll of which
nothing is known, or whose engine went away, looks there, and one whose report was lost finds it there the next time.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Ended = TypeVar("Ended")


class Waiters(Generic[Ended]):
    """All polls that wait now, and the requests that need no looking up because they are known to run."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._polls: defaultdict[str, set[asyncio.Future[Ended | None]]] = defaultdict(set)
        self._running: set[str] = set()
        self._closed = False

    def expect(self, request_id: str) -> None:
        """The engine will report how this request ends: polls for it need not look until then."""
        self._running.add(request_id)

    async def wait_for(self, request_id: str, look: Callable[[], Awaitable[Ended | None]], timeout_s: float) -> Ended | None:
        """How the request ended, as it is delivered or as `look` finds it; None after `timeout_s` seconds or `close`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            with self._registered(request_id) as poll:  # before looking: what is delivered while we look is not lost
                if request_id not in self._running and (found := await look()) is not None:
                    return found
                if self._closed:
                    return None
                try:
                    async with asyncio.timeout_at(deadline):
                        ended = await poll
                except TimeoutError:
                    self._running.discard(request_id)  # should the report have been lost, the next poll finds it
                    return None
            if ended is not None:
                return ended

    @contextmanager
    def _registered(self, request_id: str) -> Iterator[asyncio.Future[Ended | None]]:
        poll: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        self._polls[request_id].add(poll)
        try:
            yield poll
        finally:
            self._polls[request_id].discard(poll)
            if not self._polls[request_id]:
                del self._polls[request_id]

    def deliver(self, request_id: str, ended: Ended) -> None:
        """Answer the polls for this request."""
        self._end(request_id, ended)

    def look_again(self, request_id: str) -> None:
        """Make the polls for this request look: it is not known to run any more."""
        self._end(request_id, None)

    def _end(self, request_id: str, ended: Ended | None) -> None:
        self._running.discard(request_id)
        for poll in self._polls.get(request_id, ()):
            if not poll.done():  # its time may just have run out
                poll.set_result(ended)

    def all_look_again(self) -> None:
        """Make every poll look."""
        self._running.clear()
        for request_id in self._polls:
            self.look_again(request_id)

    def close(self) -> None:
        """Let every poll, now and later, look once more and return."""
        self._closed = True
        self.all_look_again()
