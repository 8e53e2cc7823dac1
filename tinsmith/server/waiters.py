"""Long polls that wait for a request id.

The engine's message brings them the outcome, without the store. The store remains the truth: polls look there for what
is not known to run, and after a message was lost.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

Ended = TypeVar("Ended")


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds for an event; returns whether it came."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


class Waiters(Generic[Ended]):
    """The polls that wait now, and the requests known to run."""

    def __init__(self) -> None:
        self._polls: defaultdict[str, set[asyncio.Future[Ended | None]]] = defaultdict(set)
        self._running: set[str] = set()
        self._closed = False

    @property
    def count(self) -> int:
        """Number of polls that wait."""
        return sum(map(len, self._polls.values()))

    @property
    def is_closed(self) -> bool:
        """Whether the server stops, so that nothing is waited for."""
        return self._closed

    def expect(self, request_id: str) -> None:
        """Note that the engine will report this request: until then polls need not read the store."""
        self._running.add(request_id)

    async def wait_for(
        self, request_id: str, look: Callable[[], Awaitable[Ended | None]], timeout_s: float
    ) -> Ended | None:
        """The outcome, delivered or found by `look`; None after `timeout_s` seconds or `close`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            # Before looking, so that an outcome that is delivered meanwhile is not missed
            with self._registered(request_id) as poll:
                if request_id not in self._running and (found := await look()) is not None:
                    return found
                if self._closed:
                    return None
                try:
                    async with asyncio.timeout_at(deadline):
                        ended = await poll
                except TimeoutError:
                    self._running.discard(request_id)  # if the message was lost, the next poll looks for the outcome
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
        self._running.clear()
        for request_id in self._polls:
            self.look_again(request_id)

    def close(self) -> None:
        """Make every poll, now or later, look once and return."""
        self._closed = True
        self.all_look_again()
