"""Long polls that wait for a request id, and waking them."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Found = TypeVar("Found")


class Waiters:
    """All polls that wait now."""

    def __init__(self) -> None:
        """Nobody waits yet."""
        self._events: defaultdict[str, set[asyncio.Event]] = defaultdict(set)
        self._closed = False

    async def wait_for(self, request_id: str, look: Callable[[], Awaitable[Found | None]], timeout_s: float) -> Found | None:
        """What `look` finds, looking again whenever `request_id` is woken; None after `timeout_s` seconds or `close`."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        with self._registered(request_id) as woken:
            while True:
                # Cleared before looking: what becomes known while we look wakes us again.
                woken.clear()
                found = await look()
                if found is not None or self._closed:
                    return found
                try:
                    async with asyncio.timeout_at(deadline):
                        await woken.wait()
                except TimeoutError:
                    return None

    @contextmanager
    def _registered(self, request_id: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._events[request_id].add(event)
        try:
            yield event
        finally:
            self._events[request_id].discard(event)
            if not self._events[request_id]:
                del self._events[request_id]

    def wake(self, request_ids: Iterable[str]) -> None:
        """Make the polls for these ids look again."""
        for request_id in request_ids:
            for event in self._events.get(request_id, ()):
                event.set()

    def wake_all(self) -> None:
        """Make every poll look again."""
        self.wake(list(self._events))

    def close(self) -> None:
        """Let every poll, now and later, look once more and return."""
        self._closed = True
        self.wake_all()
