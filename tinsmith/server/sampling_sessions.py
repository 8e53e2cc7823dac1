"""Sampling sessions whose weights exist, each looked up once: samples must not wait for the database."""

from collections.abc import Callable

from tinsmith.errors import NotFoundError
from tinsmith.server.async_store import AsyncStore
from tinsmith.store.records import SamplingSession
from tinsmith.store.store import Store

_PUBLISH_AGAIN = (
    "publish weights again (save_weights_and_get_sampling_client) and sample with the client that this gives. If the model is lost too, "
    "first go on from its newest checkpoint; weights that are saved under a name outlive the server"
)


class SamplingSessions:
    """Sampling sessions by id."""

    def __init__(self, store: AsyncStore, told: Callable[[str, str | None], str]) -> None:
        """`told` is what clients may read of an error, by its category."""
        self._store = store
        self._told = told
        self._ready: dict[str, SamplingSession] = {}

    async def find(self, sampling_session_id: str) -> SamplingSession:
        """A session whose weights exist. Raises NotFoundError with the reason."""
        session = self._ready.get(sampling_session_id)
        if session is None:
            session = await self._look_up(sampling_session_id)
            self._ready[sampling_session_id] = session
        return session

    async def _look_up(self, sampling_session_id: str) -> SamplingSession:
        session = await self._store.read(Store.sampling_session, sampling_session_id)
        if session is None:
            raise NotFoundError(f"sampling session {sampling_session_id!r} does not exist")
        if session.gone is not None:
            raise NotFoundError(
                f"the weights of sampling session {sampling_session_id} are gone: {self._told(session.gone, None)}; {_PUBLISH_AGAIN}"
            )
        if session.snapshot_id is not None:
            saved = await self._store.read(Store.outcome, session.snapshot_id)
            if saved is None and await self._store.read(Store.status, session.snapshot_id) != "dropped":
                raise NotFoundError(f"the weights of sampling session {sampling_session_id} are being saved; wait for its future first")
            if saved is not None and saved.error is not None:
                why = self._told(saved.error, saved.category)
                raise NotFoundError(f"the weights of sampling session {sampling_session_id} could not be saved: {why}")
        return session

    def forget(self, session_id: str) -> None:
        self._ready = {key: ready for key, ready in self._ready.items() if ready.session_id != session_id}

    def forget_snapshots(self) -> None:
        """Forget those of snapshots: their engine has died."""
        self._ready = {key: ready for key, ready in self._ready.items() if ready.snapshot_id is None}
