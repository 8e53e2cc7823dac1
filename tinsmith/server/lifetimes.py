"""Ends sessions whose clients have gone away, drops unfetched results and expired checkpoints, and checks the database.

When a session was last heard of is kept in memory, so that no heartbeat waits for the database, and in monotonic time,
so that setting the clock ends no session.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from tinsmith.config import ServerConfig
from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.server.async_store import AsyncStore
from tinsmith.store import ids
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.store import Store, sweep
from tinsmith.store.uploads import Uploads
from tinsmith.store.usage import note_storage

log = logging.getLogger(__name__)

_LONGEST_ROUND_S = 30.0
_CHECK_S = 60.0
"""Least seconds between two checks of the database."""
_CHECK_PAUSE = 100
"""Least pause between two checks, as a multiple of what one takes."""


class Lifetimes:
    """The times at which sessions were last heard of, and the round that ends what is over."""

    def __init__(self, config: ServerConfig, store: AsyncStore, files: CheckpointFiles, uploads: Uploads) -> None:
        """No session ends before `session_idle_s` after the first round: clients could not reach us earlier."""
        self._config = config
        self._store = store
        self._files = files
        self._uploads = uploads
        self._seen: dict[str, float] = {}
        """Monotonic time of each session's last request or heartbeat, or of the round that first met it."""
        self._open: set[str] = set()
        """Sessions that were open in the database and have not ended since."""
        self.damage = ""
        """Damage that the last check found, or empty."""
        self._check_at = 0.0

    @property
    def round_s(self) -> float:
        return min(_LONGEST_ROUND_S, self._config.session_idle_s / 4)

    def saw(self, owned_id: str) -> None:
        """Note a request for a model, sampling session or request id."""
        self.saw_session(ids.session_of(owned_id))

    def saw_session(self, session_id: str) -> None:
        """Note a heartbeat. Only sessions of the last round are remembered: anyone can make up an id."""
        if session_id in self._seen:
            self._seen[session_id] = time.monotonic()

    def began(self, session_id: str) -> None:
        self._open.add(session_id)

    async def is_open(self, session_id: str) -> bool:
        """Whether a session exists and has not ended. Looked up once: heartbeats must not wait for the database."""
        if session_id not in self._open:
            session = await self._store.read(Store.session, session_id)
            if session is None or session.finished_at is not None:
                return False
            self._open.add(session_id)
        return True

    def ended(self, session_id: str) -> None:
        self._open.discard(session_id)

    async def end_idle_sessions(self) -> AsyncIterator[str]:
        """Finish sessions that were silent for `session_idle_s`.

        Yields each as soon as it is finished, so that its work ends even if the next one fails.
        """
        open_sessions = await self._store.read(Store.open_sessions)
        now, idle_s = time.monotonic(), self._config.session_idle_s
        self._seen = {session_id: self._seen.get(session_id, now) for session_id in open_sessions}
        self._open.intersection_update(open_sessions)
        idle = [session_id for session_id, seen in self._seen.items() if now - seen >= idle_s]
        reason = f"no sign of life for {idle_s:g} s"
        for session_id in idle:
            if await self._store.write(Store.finish_session, session_id, "expired", reason):
                yield session_id

    async def drop_results(self) -> None:
        """Drop results older than `result_ttl_s`, and those of sessions that ended before the last round."""
        now = time.time()
        await self._store.write(Store.drop_results, now - self._config.result_ttl_s, now - self.round_s)
        await self._store.write(Store.give_back_space)

    async def note_storage(self) -> None:
        """Note what tenants store."""
        await self._store.write(note_storage)

    async def forget_ended(self) -> None:
        """Forget sessions that ended `ended_session_ttl_s` ago, but for runs that have checkpoints."""
        forgotten = await self._store.write(Store.forget_ended, time.time() - self._config.ended_session_ttl_s)
        if forgotten:
            log.info("%d rows of sessions that ended long ago are deleted", forgotten)

    async def sweep(self) -> None:
        """Delete expired checkpoints and uploads, and files of none.

        Runs among the reads: an object store may delete slowly.
        """
        await self._store.read(sweep, self._files)
        await asyncio.to_thread(self._uploads.sweep)

    async def check_database(self) -> None:
        """Read the whole database, if due. Raises ConfigError if it is damaged."""
        began = time.monotonic()
        if began < self._check_at:
            return
        try:
            await self._store.read(Store.check)
            self.damage = ""
        except ConfigError as error:
            self.damage = str(error)
            raise
        finally:
            ended = time.monotonic()
            self._check_at = ended + max(_CHECK_S, _CHECK_PAUSE * (ended - began))


async def keep_up(lifetimes: Lifetimes, on_session_end: Callable[[str], Awaitable[None]]) -> None:
    """Run rounds until cancelled; `on_session_end` is awaited with the id of each session that ends.

    Each part of a round fails alone.
    """
    while True:
        await asyncio.sleep(lifetimes.round_s)
        with failing_into(partial(_log, "idle sessions could not be ended")):
            async for session_id in lifetimes.end_idle_sessions():
                log.info("session %s has ended: no sign of life", session_id, extra={"session": session_id})
                with failing_into(partial(_log, f"the models of session {session_id} could not be unloaded")):
                    await on_session_end(session_id)
        with failing_into(partial(_log, "old results could not be dropped")):
            await lifetimes.drop_results()
        with failing_into(partial(_log, "sessions that ended long ago could not be forgotten")):
            await lifetimes.forget_ended()
        with failing_into(partial(_log, "what is stored could not be noted")):
            await lifetimes.note_storage()
        with failing_into(partial(_log, "files that belong to no checkpoint could not be deleted")):
            await lifetimes.sweep()
        with failing_into(partial(_log, "the database is not sound")):
            await lifetimes.check_database()


def _log(what: str, error: TinsmithError) -> None:
    log.error("%s: %s", what, error)
