"""Limits the size of queued training operations, in all and by session, and lets polls wait for operations and samples.

Queued operations are in the store, so this limits the disk, not the memory. An operation over it is answered 429: the SDK repeats it
for some five minutes, so the sequence gets no hole.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from cachetools import LRUCache

from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError
from tinsmith.store import ids

log = logging.getLogger(__name__)

_KNOWN_MODELS = 4096
"""Models whose last ended operation is remembered."""


class QueuedOperations:
    """Bytes of payloads and images by request id. In memory: a server that starts has no queued operations."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = config.max_queued_mib * 2**20, config.max_queued_session_mib * 2**20
        self._sizes: dict[str, int] = {}
        self._of_session: Counter[str] = Counter()
        self._of_model: defaultdict[str, set[int]] = defaultdict(set)
        """seq_ids that are queued."""
        self._ended: LRUCache[str, int] = LRUCache(_KNOWN_MODELS)
        """The highest seq_id of each model that has ended."""

    def admit(self, model_id: str, seq_id: int, size: int) -> bool:
        """Count an operation of `size` bytes. False if it is counted already. Raises BackpressureError if it has to wait.

        The SDK sends the first part of a large call last, once all others are accepted. So an operation that others of its model wait for
        is always accepted, and while it is missing, the others are not held to their session's limit: nothing queued of their model could
        run and make room.
        """
        request_id, session_id = ids.request_id(model_id, seq_id), ids.session_of(model_id)
        if request_id in self._sizes:
            return False
        ended = self._ended.get(model_id, -1)
        # A save may end after what comes behind it, which does not wait for it.
        first = min((queued for queued in self._of_model.get(model_id, ()) if queued > ended), default=0)
        if seq_id >= first:
            self._check("all sessions have", self._of_session.total(), size, self._limits[0], "max_queued_mib")
        if seq_id >= first and first <= ended + 1:
            self._check(f"session {session_id} has", self._of_session[session_id], size, self._limits[1], "max_queued_session_mib")
        self._sizes[request_id] = size
        self._of_session[session_id] += size
        self._of_model[model_id].add(seq_id)
        return True

    def _check(self, whose: str, queued: int, size: int, limit: int, setting: str) -> None:
        if queued and queued + size > limit:  # with nothing queued, one operation may be larger than the limit
            reason = f"{whose} {queued} bytes of operations queued, and {size} more are over {limit} ({setting}); send this one later"
            log.info("answered 429: %s", reason)
            raise BackpressureError(reason)

    def end(self, request_id: str) -> None:
        """Count an operation no more that has ended, or was not accepted."""
        size, key = self._sizes.pop(request_id, None), ids.parse_request_id(request_id)
        if size is None or key is None:
            return
        model_id, seq_id = key
        session_id = ids.session_of(model_id)
        self._ended[model_id] = max(seq_id, self._ended.get(model_id, -1))
        self._of_session[session_id] -= size
        self._of_model[model_id].discard(seq_id)
        if not self._of_model[model_id]:
            del self._of_model[model_id]
        if not self._of_session[session_id]:
            del self._of_session[session_id]

    def clear(self) -> None:
        """Forget everything: the engine has ended."""
        self._sizes.clear()
        self._of_session.clear()
        self._of_model.clear()
        self._ended.clear()


# Long polls that wait for a request id.
#
# The engine's message brings them the outcome, without the store. The store remains the truth: polls look there for what is not known to
# run, and after a message was lost.

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

    def expect(self, request_id: str) -> None:
        """Note that the engine will report this request: until then polls need not read the store."""
        self._running.add(request_id)

    async def wait_for(self, request_id: str, look: Callable[[], Awaitable[Ended | None]], timeout_s: float) -> Ended | None:
        """The outcome, delivered or found by `look`; None after `timeout_s` seconds or `close`."""
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
