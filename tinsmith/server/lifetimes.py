"""What ends by itself: sessions that show no sign of life, results that nobody will fetch any more, checkpoints whose time is over.

Heartbeats are written as they come; other requests are only noted in memory and written at the next round, because a sample must not
wait for the database.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from tinsmith.config import ServerConfig
from tinsmith.engine.boundary import failing_into
from tinsmith.server.async_store import AsyncStore
from tinsmith.store import ids
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store
from tinsmith.store.sweep import sweep

log = logging.getLogger(__name__)

_LONGEST_ROUND_S = 30.0


class Lifetimes:
    """When sessions were last seen, and the round that ends what is over."""

    def __init__(self, config: ServerConfig, store: AsyncStore, files: CheckpointFiles) -> None:
        """Clients had no way to show themselves before now, so no session ends earlier than `session_idle_s` from now."""
        self._config = config
        self._store = store
        self._files = files
        self._started_at = time.time()
        self._seen: dict[str, float] = {}
        """Unix time of the last request of a session since the last round."""

    @property
    def round_s(self) -> float:
        """Seconds between two rounds."""
        return min(_LONGEST_ROUND_S, self._config.session_idle_s / 4)

    def saw(self, owned_id: str) -> None:
        """Note a request for a model, sampling session or request id."""
        self._seen[ids.session_of(owned_id)] = time.time()

    async def end_idle_sessions(self) -> list[str]:
        """Finish the sessions without heartbeat and request for `session_idle_s`; returns their ids."""
        seen, self._seen = self._seen, {}
        await self._store.write(Store.touch_sessions, seen)
        idle_s = self._config.session_idle_s
        if time.time() - self._started_at < idle_s:
            return []
        return await self._store.write(Store.finish_idle_sessions, time.time() - idle_s, f"no sign of life for {idle_s:g} s")

    async def drop_results(self) -> None:
        """Forget results older than `result_ttl_s`, and those of sessions that were finished before the last round."""
        now = time.time()
        await self._store.write(Store.drop_results, now - self._config.result_ttl_s, now - self.round_s)

    async def sweep(self) -> None:
        """Delete expired checkpoints, and files that belong to none. Among the reads: an object store may be slow to delete."""
        await self._store.read(sweep, self._files)


async def keep_up(lifetimes: Lifetimes, on_session_end: Callable[[str], Awaitable[None]]) -> None:
    """One round after the other until cancelled. `on_session_end` is awaited with the id of each session that has ended."""
    while True:
        await asyncio.sleep(lifetimes.round_s)
        with failing_into(lambda error: log.error("what is over could not be cleared: %s", error)):
            for session_id in await lifetimes.end_idle_sessions():
                log.info("session %s has ended: no sign of life", session_id)
                await on_session_end(session_id)
            await lifetimes.drop_results()
            await lifetimes.sweep()
