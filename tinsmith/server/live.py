"""Pages that change while people look at them, as streams of server-sent events.

All who look at one page through one key share one computation, which is repeated every second, or more seldom the more
look and the longer it takes: watching takes little from training, however many watch.
"""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tinsmith.errors import StoreUnavailableError, TinsmithError, reported

log = logging.getLogger(__name__)

MOST_STREAMS = 2000
"""Streams that one process keeps open; further ones are answered 429."""
_EVERY_S = 1.0
"""Seconds between two computations of a page that somebody looks at."""
_STREAMS_A_SECOND = 50
"""Streams that are written to in a second: with more, pages are computed more seldom."""
_LEAST_REST = 20
"""Pages are computed again after so many times the time that this took: all of them use 5 % of a core at most."""
_LOOK_S = 5.0
"""Seconds after which a stream's key is looked at again, and its client told that the stream goes on; more of many."""


_TROUBLE = "trouble"
"""The event of what keeps a page from changing; it is empty when that is over."""
_AWAY = "The server cannot read its database now. This page shows what it read last, and goes on by itself."


@dataclass(eq=False)
class _LivePage:
    """The blocks of a page that somebody looks at."""

    events: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """The last event of each block, and the version that brought it."""
    version: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at the next version, and replaced by another event."""
    followers: int = 0
    task: "asyncio.Task[None] | None" = None

    def take(self, blocks: Mapping[str, str]) -> None:
        """Note blocks that are others than before."""
        made = {name: _event(name, content) for name, content in blocks.items()}
        new = {name: event for name, event in made.items() if self.events.get(name, (0, b""))[1] != event}
        if new:
            self.version += 1
            self.events |= {name: (self.version, event) for name, event in new.items()}
            self.changed.set()
            self.changed = asyncio.Event()

    def since(self, version: int) -> bytes:
        return b"".join(event for at, event in self.events.values() if at > version)


class LivePages:
    """The pages of one process that somebody looks at."""

    def __init__(self) -> None:
        self._pages: dict[Hashable, _LivePage] = {}
        self._closed = asyncio.Event()

    @property
    def count(self) -> int:
        """Streams that are open."""
        return sum(page.followers for page in self._pages.values())

    def close(self) -> None:
        """End all streams."""
        self._closed.set()
        for page in self._pages.values():
            page.changed.set()

    async def follow(
        self,
        key: Hashable,
        compute: Callable[[], Awaitable[Mapping[str, str]]],
        still: Callable[[], Awaitable[None]],
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a page: all blocks, then those that change, until `still` raises a TinsmithError."""
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _LivePage()
            page.task = asyncio.create_task(self._keep_up(page, compute))
        page.followers += 1
        seen, looked_at = 0, time.monotonic()
        try:
            while not self._closed.is_set():
                changed = page.changed
                if page.version > seen:
                    seen, events = page.version, page.since(seen)
                    yield events
                    continue
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), self._look_s)
                    await asyncio.sleep(random.uniform(0.0, self._pause_s - _EVERY_S))  # not all at once
                if time.monotonic() - looked_at >= self._look_s:
                    looked_at = time.monotonic()
                    try:
                        await still()
                    except TinsmithError:
                        return
                    yield b": \n\n"
        finally:
            page.followers -= 1
            if page.followers == 0 and page.task is not None:
                page.task.cancel()
                del self._pages[key]

    @property
    def _look_s(self) -> float:
        return max(_LOOK_S, self.count / _STREAMS_A_SECOND)

    @property
    def _pause_s(self) -> float:
        return max(_EVERY_S, self.count / _STREAMS_A_SECOND)

    async def _keep_up(self, page: _LivePage, compute: Callable[[], Awaitable[Mapping[str, str]]]) -> None:
        """Compute a page again and again. What fails once, such as a database that is away, is tried again."""
        while True:
            began = time.monotonic()
            with reported(TinsmithError, partial(_note_trouble, page)):
                over = {_TROUBLE: ""} if _TROUBLE in page.events else {}
                page.take({**await compute(), **over})
            await asyncio.sleep(max(self._pause_s, _LEAST_REST * len(self._pages) * (time.monotonic() - began)))


def _note_trouble(page: _LivePage, error: TinsmithError) -> None:
    log.info("a page cannot be shown now: %s", error)
    if isinstance(error, StoreUnavailableError):
        page.take({_TROUBLE: _AWAY})


def _event(name: str, content: str) -> bytes:
    # Each of these ends a line of a stream: what somebody has written must not begin an event
    lines = "\n".join(f"data: {line}" for line in re.split("\r\n|\r|\n", content))
    return f"event: {name}\n{lines}\n\n".encode()
