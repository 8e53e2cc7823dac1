"""Tenants: which of them a request comes from, by its API key, and what belongs to them.

A server that never had a key serves one tenant, `local`, whose client may do everything. It listens on the loopback
address only (`main.py`).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from cachetools import LRUCache
from starlette.requests import cookie_parser

from tinsmith.errors import BackpressureError, StoreUnavailableError, reported
from tinsmith.server.async_store import Stored
from tinsmith.server.replies import UnauthorizedError
from tinsmith.store import ids
from tinsmith.store.keys import begin_login, end_login, find_key, find_login, list_keys, living_logins
from tinsmith.store.records import LOCAL, ApiKey, Role
from tinsmith.store.store import Store
from tinsmith.store.usage import living_bytes

log = logging.getLogger(__name__)

_FRESH_S = 1.0
"""Seconds after which keys are read again, beside the request that finds them old; one with an unknown key waits."""
_STALE_S = 5.0
"""Seconds after which every request waits for the keys: a revoked one ends by then."""
_KNOWN_OWNERS = 2**16
_KNOWN_LOGINS = 1024
"""They are looked up again with the keys; others are read for each request."""
_BEARER = "bearer "
COOKIE = "tinsmith_login"
"""The cookie of those who have logged in."""


@dataclass(frozen=True)
class Caller:
    """The client of a request."""

    tenant: str
    role: Role
    key: ApiKey | None = None
    """None where there are no keys."""

    @property
    def sees(self) -> str | None:
        """The tenant whose things it may use; None for those of all."""
        return None if self.role == "admin" else self.tenant


EVERYONE = Caller(LOCAL, "admin")
"""The client of every request where there are no keys."""


class Tenants:
    """The keys of a server, and the owners of what is in its store."""

    def __init__(self, store: Stored, served: Callable[[], Collection[str]]) -> None:
        """`served` returns the names of the base models that can be used; of none before they are known."""
        self._store = store
        self._served = served
        self._told: set[str] = set()
        """Keys that allow what is not served, by the part that is no secret."""
        self._keys: dict[str, ApiKey] | None = None
        """By the part that is no secret; None before they were read."""
        self._read_at = -math.inf
        """Monotonic time."""
        self._reading: asyncio.Task[None] | None = None
        self._owned: LRUCache[tuple[str | None, str], bool] = LRUCache(_KNOWN_OWNERS)
        """What was found to be a tenant's. A foreign id is looked up each time, as one that does not exist."""
        self._sessions: LRUCache[str, None] = LRUCache(_KNOWN_OWNERS)
        """Sessions of these."""
        self._logins: LRUCache[str, str] = LRUCache(_KNOWN_LOGINS)
        """Keys, by the part that is no secret, of logins that were found: as old as the keys."""

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """The client that sent these headers. Raises UnauthorizedError without a key that is valid here."""
        keys = await self._known_keys(_STALE_S)
        if not keys:
            return EVERYONE
        text = _sent_key(headers)
        login = None if text else await self._login(headers)
        if login is not None:
            key = keys.get(login) or (await self._known_keys(0.0)).get(login)
        else:
            key = find_key(keys, text) or find_key(await self._known_keys(0.0), text)
        if key is None or key.revoked_at is not None:
            raise UnauthorizedError(
                "this server needs an API key that it knows, in the header X-API-Key: set TINKER_API_KEY; "
                "`tinsmith keys add` beside the server makes one"
            )
        if key.expires_at is not None and key.expires_at <= time.time():
            ended = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(key.expires_at))
            raise UnauthorizedError(f"the API key {key.name!r} expired at {ended} UTC; ask for another one")
        return Caller(key.tenant, key.role, key)

    async def _login(self, headers: Mapping[str, str]) -> str | None:
        """The key, by its part that is no secret, with which the browser that sent these headers is logged in."""
        text = _sent_cookie(headers)
        found = self._logins.get(text)
        if found is None and text:
            found = await self._store.read(find_login, text)
            if found is not None:
                self._logins[text] = found
        return found

    async def log_in(self, key: ApiKey) -> str:
        """Begin a login with a key; returns the value of its cookie."""
        return await self._store.write(begin_login, key.key_id)

    async def log_out(self, headers: Mapping[str, str]) -> None:
        """End the login of the browser that sent these headers. Other processes of the server hear of it in 5 s."""
        text = _sent_cookie(headers)
        if text and await self._store.read(find_login, text) is not None:  # anybody may send a cookie that is none
            await self._store.write(end_login, text)
            self._logins.pop(text, None)

    async def _known_keys(self, most_age_s: float) -> dict[str, ApiKey]:
        """The keys as they were read up to `most_age_s` seconds ago; older than a second, they are read meanwhile."""
        age_s = time.monotonic() - self._read_at
        if age_s >= min(_FRESH_S, most_age_s) and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read())
        if age_s >= most_age_s and self._reading is not None:
            await asyncio.shield(self._reading)
        return self._keys or {}

    async def _read(self) -> None:
        # While the database cannot be read, the keys and logins that were valid just before go on counting
        with reported(() if self._keys is None else StoreUnavailableError, partial(log.warning, "%s")):
            read = {key.key_id: key for key in await self._store.read(list_keys)}
            self._keys = read or self._keys or {}  # a table that lost its rows lets nobody in
            self._warn_of_unserved(self._keys.values())
            if known := list(self._logins):
                for text in set(known) - await self._store.read(living_logins, known):
                    self._logins.pop(text, None)
        self._read_at = time.monotonic()

    def _warn_of_unserved(self, keys: Iterable[ApiKey]) -> None:
        """Warn once of each key that allows base models which are not served: their names may be mistyped."""
        served = self._served()
        for key in keys:
            unserved = [name for name in key.models or () if name not in served]
            if served and unserved and key.revoked_at is None and key.key_id not in self._told:
                self._told.add(key.key_id)
                wrong, right = ", ".join(unserved), ", ".join(served)
                log.warning("key %r allows the base models %s, and this server serves %s", key.name, wrong, right)

    async def owns(self, caller: Caller, owned_id: str) -> bool:
        """Whether a session, model, sampling session or run is there, and the caller's."""
        key = caller.sees, owned_id
        if key not in self._owned and await self._store.read(Store.owns, owned_id, caller.sees):
            self._owned[key] = True
            self._sessions[ids.session_of(owned_id) or owned_id] = None
        return key in self._owned

    def knows(self, session_id: str) -> bool:
        """Whether there is such a session, as an earlier request has shown."""
        return session_id in self._sessions


async def require_storage(store: Stored, caller: Caller) -> int | None:
    """Return the bytes that the caller's key still allows, None if any. Raises BackpressureError if none."""
    key = caller.key
    if key is not None and key.storage_bytes is not None:
        stored = await store.read(living_bytes, key.tenant)
        if stored >= key.storage_bytes:
            raise BackpressureError(
                f"tenant {key.tenant!r} stores {stored:,} bytes of checkpoints, and key {key.name!r} allows "
                f"{key.storage_bytes:,}; delete some, or let them expire, and save again"
            )
        return key.storage_bytes - stored
    return None


def _sent_cookie(headers: Mapping[str, str]) -> str:
    # As browsers parse them: another program of this host may have set one that no RFC allows
    return cookie_parser(headers.get("cookie", "")).get(COOKIE, "")


def _sent_key(headers: Mapping[str, str]) -> str:
    authorization = headers.get("authorization", "")
    bearer = authorization[len(_BEARER) :] if authorization.lower().startswith(_BEARER) else ""
    return headers.get("x-api-key") or bearer.strip()
