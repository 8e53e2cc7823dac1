"""Limits the size of queued training operations, in all and by session.

They are in the store, so this limits the disk, not the memory. An operation over it is answered 429: the SDK repeats it
for some five minutes, so the sequence gets no hole.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection

from cachetools import LRUCache

from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError
from tinsmith.store import ids
from tinsmith.store.records import ApiKey, Unfinished

log = logging.getLogger(__name__)

_KNOWN_MODELS = 4096
"""Models whose last ended operation is remembered."""
_PARTS = 256
"""Parts of a large call that a tenant may send before the first of them."""


class QueuedOperations:
    """Bytes of payloads and images by request id. In memory: those of a server before count without their images."""

    def __init__(self, config: ServerConfig) -> None:
        self._limits = config.max_queued_mib * 2**20, config.max_queued_session_mib * 2**20
        self._sizes: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        """Tenants of operations that were sent with a key."""
        self._of_tenant: Counter[str] = Counter()
        """Their numbers."""
        self._of_session: Counter[str] = Counter()
        self._of_model: defaultdict[str, set[int]] = defaultdict(set)
        """seq_ids that are queued."""
        self._ended: LRUCache[str, int] = LRUCache(_KNOWN_MODELS)
        """The highest seq_id of each model that has ended."""

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self._of_session.total()

    def admit(self, model_id: str, seq_id: int, size: int, key: ApiKey | None = None) -> bool:
        """Count an operation of `size` bytes, sent with this key.

        False if it is counted already. Raises BackpressureError if it has to wait.

        The SDK sends the first part of a large call last, once all others are accepted. So an operation that others of
        its model wait for is always accepted, and while it is missing, the others are not held to their session's
        limit: nothing queued of their model could run and make room. A tenant with a limit may have `_PARTS` more then,
        and each of its models as many again. A client that counts down comes to these ends, or to `max_queued_mib`.
        """
        request_id, session_id = ids.request_id(model_id, seq_id), ids.session_of(model_id)
        if request_id in self._sizes:
            return False
        ended = self._ended.get(model_id, -1)
        # A save may end after what comes behind it, which does not wait for it.
        first = min((queued for queued in self._of_model.get(model_id, ()) if queued > ended), default=0)
        of_session = self._of_session[session_id]
        if seq_id >= first:
            self._check("all sessions have", self.size, size, self._limits[0], "max_queued_mib")
        elif of_session > self._limits[0]:
            self._check(f"session {session_id} has", of_session, size, self._limits[0], "max_queued_mib")
        if seq_id >= first and first <= ended + 1:
            self._check(f"session {session_id} has", of_session, size, self._limits[1], "max_queued_session_mib")
        if key is not None and key.max_parallel is not None:
            of_tenant, of_model = self._of_tenant[key.tenant], len(self._of_model.get(model_id, ()))
            if seq_id < first:
                self._check_parallel(key, f"model {model_id}", of_model, key.max_parallel + 2 * _PARTS)
            else:
                parts = _PARTS if first > ended + 1 else 0
                self._check_parallel(key, f"tenant {key.tenant!r}", of_tenant, key.max_parallel + parts)
        if key is not None:
            self._tenants[request_id] = key.tenant
            self._of_tenant[key.tenant] += 1
        self._count(request_id, size)
        return True

    def _check_parallel(self, key: ApiKey, whose: str, unfinished: int, most: int) -> None:
        if unfinished >= most:
            reason = (
                f"{unfinished} operations of {whose} are unfinished, and key {key.name!r} allows {key.max_parallel}; "
                "send this one later"
            )
            log.info("answered 429: %s", reason)
            raise BackpressureError(reason)

    def _check(self, whose: str, queued: int, size: int, limit: int, setting: str) -> None:
        if queued and queued + size > limit:  # with nothing queued, one operation may be larger than the limit
            reason = (
                f"{whose} {queued} bytes of operations queued, and {size} more are over {limit} ({setting}); "
                "send this one later"
            )
            log.info("answered 429: %s", reason)
            raise BackpressureError(reason)

    def end(self, request_id: str) -> None:
        """Count an operation no more that has ended, or was not accepted."""
        size, key = self._sizes.pop(request_id, None), ids.parse_request_id(request_id)
        if size is None or key is None:
            return
        if (tenant := self._tenants.pop(request_id, None)) is not None:
            self._of_tenant[tenant] -= 1
        model_id, seq_id = key
        session_id = ids.session_of(model_id)
        self._ended[model_id] = max(seq_id, self._ended.get(model_id, -1))
        self._of_session[session_id] -= size
        self._of_model[model_id].discard(seq_id)
        if not self._of_model[model_id]:
            del self._of_model[model_id]
        if not self._of_session[session_id]:
            del self._of_session[session_id]

    def replace(self, unfinished: Collection[Unfinished]) -> None:
        """Count these alone, which an engine that has ended has left."""
        sizes, tenants = dict(self._sizes), dict(self._tenants)
        for counted in (self._sizes, self._tenants, self._of_tenant, self._of_session, self._of_model, self._ended):
            counted.clear()
        for each in unfinished:
            self._count(each.request_id, sizes.get(each.request_id, each.size))
            if each.request_id not in sizes or each.request_id in tenants:
                self._tenants[each.request_id] = each.tenant
                self._of_tenant[each.tenant] += 1
        for model_id, seq_ids in self._of_model.items():
            self._ended[model_id] = min(seq_ids) - 1

    def _count(self, request_id: str, size: int) -> None:
        model_id, _, seq_id = request_id.rpartition("/")
        self._sizes[request_id] = size
        self._of_session[ids.session_of(model_id)] += size
        self._of_model[model_id].add(int(seq_id))
