"""How much the operations in the log weigh that have not ended, by session and in all, and when a new one has to wait.

They lie in the store, so this bounds the disk, not memory. A refused one is answered 429: the SDK sends the same seq_id again after
`Retry-After`, for about five minutes, so no hole is left in the sequence.
"""

import logging
from collections import Counter, defaultdict

from cachetools import LRUCache

from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError
from tinsmith.store import ids

log = logging.getLogger(__name__)


_KNOWN_MODELS = 4096
"""Models of which it is kept what has ended."""


class QueuedOperations:
    """Bytes of payloads and images, by request id. Kept in memory only: a server that starts has no queued operations."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing is queued."""
        self._limits = config.max_queued_mib * 2**20, config.max_queued_session_mib * 2**20
        self._sizes: dict[str, int] = {}
        self._of_session: Counter[str] = Counter()
        self._of_model: defaultdict[str, set[int]] = defaultdict(set)
        """seq_ids that are queued."""
        self._ended: LRUCache[str, int] = LRUCache(_KNOWN_MODELS)
        """The highest seq_id of each model that has ended."""

    def admit(self, model_id: str, seq_id: int, size: int) -> bool:
        """Count an operation of `size` bytes. False if it is counted already. Raises BackpressureError if it has to wait.

        The SDK sends the first part of a call last, when all others are taken. So it never has to wait, as nothing does that others of its
        model wait for. And the other parts of a call wait for no room in their session while the first is missing: what is queued of their
        model cannot run before they are taken.
        """
        request_id, session_id = ids.request_id(model_id, seq_id), ids.session_of(model_id)
        if request_id in self._sizes:
            return False
        first = min(self._of_model.get(model_id, ()), default=0)
        if seq_id >= first:
            self._check("all sessions have", self._of_session.total(), size, self._limits[0], "max_queued_mib")
        if seq_id >= first and first <= self._ended.get(model_id, -1) + 1:
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
        """The operation has ended, or was not taken. One that is not counted is passed over."""
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
        """Nothing is queued any more: there is no engine."""
        self._sizes.clear()
        self._of_session.clear()
        self._of_model.clear()
        self._ended.clear()
