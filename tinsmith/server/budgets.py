"""What tenants use: metered, reserved while it is under way, and held to the limits of their keys.

A request reserves the most that it may use; what it has used takes the place of that when it ends. So a budget of
tokens is never exceeded, but by images of training requests, which are counted once they are rendered. Seconds of
devices are known only afterwards: what is under way when they are used up still ends.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinsmith.errors import BackpressureError, StoreUnavailableError, UserError, reported
from tinsmith.server.async_store import AsyncStore
from tinsmith.store import ids
from tinsmith.store.records import ApiKey, Unfinished, Used
from tinsmith.store.usage import DAY_S, Owned, add_usage, used_between

if TYPE_CHECKING:
    from tinsmith.server.tenants import Caller

log = logging.getLogger(__name__)

_FLUSH_S = 1.0
"""Seconds for which what samples have used waits to be written."""
_LONGEST_WAIT_S = 60.0
"""The longest Retry-After that the SDK obeys."""


@dataclass(frozen=True)
class _Reserved:
    """What a request under way may use."""

    owner: Owned
    tokens: int
    sequences: int


class Budgets:
    """All requests under way that use something, and what was used today."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._reserved: dict[str, _Reserved] = {}
        """By request id."""
        self._tokens: Counter[str] = Counter()
        """Reserved tokens by tenant."""
        self._sequences: Counter[str] = Counter()
        """Unfinished sequences of samples by tenant."""
        self._day = 0
        """The beginning of the day of `_today`, as Unix time; 0 before it was read."""
        self._today: defaultdict[str, Used] = defaultdict(Used)
        self._unwritten: defaultdict[Owned, Used] = defaultdict(Used)
        self._flushing: asyncio.Task[None] | None = None
        self._writer = f"usage {uuid.uuid4().hex}"
        self._number = 0
        """Of what is written, which stays as it is until that is known to be done."""
        self._writing: Mapping[Owned, Used] = {}
        self._turn = asyncio.Lock()

    async def reserve(
        self, request_id: str, caller: "Caller", owner: Owned, tokens: int, sequences: int = 0, binds: bool = True
    ) -> bool:
        """Reserve what a request may use, unless it has that already; False then.

        Unless it `binds`, it is not held to limits: a step whose gradients are there, or a save. Raises
        BackpressureError until there is room, and UserError if there never will be.
        """
        await self._begin_day()
        if request_id in self._reserved:
            return False
        if caller.key is not None and binds:
            self._check(caller.key, tokens, sequences)
        self._reserved[request_id] = _Reserved(owner, tokens, sequences)
        self._tokens[caller.tenant] += tokens
        self._sequences[caller.tenant] += sequences
        return True

    def _check(self, key: ApiKey, tokens: int, sequences: int) -> None:
        whose, used = f"tenant {key.tenant!r}", self._today[key.tenant]
        if key.max_parallel is not None and sequences:
            running = self._sequences[key.tenant]
            if sequences > key.max_parallel:
                raise UserError(
                    f"num_samples={sequences} is more than key {key.name!r} may run at a time ({key.max_parallel}); "
                    "split the request"
                )
            if running + sequences > key.max_parallel:
                raise BackpressureError(
                    f"{running} sequences of {whose} are unfinished, and with {sequences} more they are over the "
                    f"{key.max_parallel} of key {key.name!r}; send this sample later"
                )
        reserved = self._tokens[key.tenant]
        if key.tokens_a_day is not None and used.tokens + reserved + tokens > key.tokens_a_day:
            if tokens > key.tokens_a_day:
                raise UserError(
                    f"the request may use {tokens:,} tokens, and key {key.name!r} has {key.tokens_a_day:,} a day; "
                    "send a smaller one, or a lower max_tokens"
                )
            raise self._over(
                f"{whose} has used {used.tokens:,} tokens today and {reserved:,} are reserved; with {tokens:,} more "
                f"that is over the {key.tokens_a_day:,} a day of key {key.name!r}"
            )
        if key.gpu_seconds_a_day is not None and used.gpu_seconds >= key.gpu_seconds_a_day:
            raise self._over(
                f"{whose} has used {used.gpu_seconds:,.1f} GPU-seconds today, "
                f"and key {key.name!r} has {key.gpu_seconds_a_day:,g} a day"
            )

    def _over(self, reason: str) -> BackpressureError:
        reset = self._day + DAY_S
        at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(reset))
        wait_s = min(_LONGEST_WAIT_S, max(1.0, reset - time.time()))
        return BackpressureError(f"{reason}; the next day begins at {at} UTC", wait_s)

    async def _begin_day(self) -> None:
        day = int(time.time()) // DAY_S * DAY_S
        if day == self._day:
            return
        # At the start a part of the day may have been used; later it has just begun
        used = await self._store.read(used_between, day, day + DAY_S) if not self._day else []
        if day == self._day:
            return  # another request has read it
        self._day, self._today = day, defaultdict(Used)
        for each in used:
            self._today[each.tenant] = self._today[each.tenant].plus(each.used)
        for (tenant, _, _), amount in [*self._unwritten.items(), *self._writing.items()] if used else ():
            self._today[tenant] = self._today[tenant].plus(amount)

    def release(self, request_id: str, used: Used | None = None) -> None:
        """End a request that was not accepted, was given up, or, of the log, has `used` this."""
        reserved = self._reserved.pop(request_id, None)
        if reserved is None:
            return
        tenant = reserved.owner[0]
        self._tokens[tenant] -= reserved.tokens
        self._sequences[tenant] -= reserved.sequences
        if used is not None:
            self._today[tenant] = self._today[tenant].plus(used)

    def sampled(self, request_id: str, used: Mapping[str, Any]) -> None:
        """End a sample that has used this."""
        reserved = self._reserved.get(request_id)
        self.release(request_id)
        if reserved is not None:
            self.add(reserved.owner, Used(**used))

    def add(self, owner: Owned, used: Used) -> None:
        """Count what samples have used, which is written within a second."""
        tenant = owner[0]
        self._today[tenant] = self._today[tenant].plus(used)
        self._unwritten[owner] = self._unwritten[owner].plus(used)
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush_later())

    def replace(self, unfinished: Collection[Unfinished]) -> None:
        """Keep what these reserve, which an engine that has ended has left, and read again what was used today.

        Those that came to a server before reserve nothing; what they use counts when they end.
        """
        left = {each.request_id: each for each in unfinished}
        for request_id in self._reserved.keys() - left.keys():
            self.release(request_id)
        for request_id in left.keys() - self._reserved.keys():
            each = left[request_id]
            owner = each.tenant, each.base_model, ids.session_of(request_id)
            self._reserved[request_id] = _Reserved(owner, 0, 0)
        self._day = 0

    async def _flush_later(self) -> None:
        while self._unwritten or self._writing:
            await asyncio.sleep(_FLUSH_S)
            with reported(StoreUnavailableError, _log_unwritten):
                await self.flush()

    async def flush(self) -> None:
        """Write what samples have used. Raises StoreUnavailableError, and keeps it for later."""
        async with self._turn:
            while self._unwritten or self._writing:
                if not self._writing:
                    self._writing, self._unwritten = self._unwritten, defaultdict(Used)
                    self._number += 1
                await self._store.write(add_usage, self._writing, self._writer, self._number)
                self._writing = {}


def _log_unwritten(error: StoreUnavailableError) -> None:
    log.warning("what samples have used is written later: %s", error)
