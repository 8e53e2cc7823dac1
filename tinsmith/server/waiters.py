"""Long polls that wait for a request id, and how they get its outcome.

The engine's message brings the outcome to the polls that wait for it, so they need not read the store. The store remains the truth: a poll
for a request that is not known to run, or whose engine has died, looks there, and if a message was lost, the next poll finds the outcome
there.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

Ended = TypeVar("Ended")


async def set_within(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait up to `timeout_s` seconds for an event; returns whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
    return event.is_set()


class Waiters(Generic[Ended]):
    """All polls that wait now, and the requests that are known to run, for which the store need not be read."""

    def __init__(self) -> None:
        self._polls: defaultdict[str, set[asyncio.Future[Ended | None]]] = defaultdict(set)
        self._running: set[str] = set()
        self._closed = False

    def expect(self, request_id: str) -> None:
        """Note that the engine will report how this request ends, so that polls for it do not read the store until then."""
        self._running.add(request_id)

    async def wait_for(self, request_id: str, look: Callable[[], Awaitable[Ended | None]], timeout_s: float) -> Ended | None:
        """The outcome, which is delivered or which `look` finds; None after `timeout_s` seconds or `close`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            with self._registered(request_id) as poll:  # before looking, so that an outcome that is delivered meanwhile is not missed
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
        """Answer the polls for this request."""
        self._end(request_id, ended)

    def look_again(self, request_id: str) -> None:
        """Make the polls for this request look for its outcome: it is not known to run any more."""
        self._end(request_id, None)

    def _end(self, request_id: str, ended: Ended | None) -> None:
        self._running.discard(request_id)
        for poll in self._polls.get(request_id, ()):
            if not poll.done():  # its time may just have run out
                poll.set_result(ended)

    def all_look_again(self) -> None:
        """Make every poll look for its outcome."""
        self._running.clear()
        for request_id in self._polls:
            self.look_again(request_id)

    def close(self) -> None:
        """Make every poll, waiting now or later, look once and return."""
        self._closed = True
        self.all_look_again()
