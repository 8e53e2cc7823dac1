"""The state of one process that answers HTTP, and its way to the hub, which keeps the state of all.

With one HTTP server the hub is in the same process. Several are processes of their own (`http_servers.py`), which keep
nothing that would be missed: what they read of the database and of files is the same in each, and every change goes
through the hub. So any of them may answer any request, and one that dies takes nothing along.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from cachetools import LRUCache
from fastapi import Request

from tinsmith.config import Config
from tinsmith.config_values import at_home
from tinsmith.console.curves import Curves
from tinsmith.console.run_files import RunFiles
from tinsmith.errors import NotFoundError, UserError
from tinsmith.server import calls
from tinsmith.server.applications import Applications
from tinsmith.server.async_store import Stored
from tinsmith.server.base_models import BaseModels
from tinsmith.server.body import LargeBodies
from tinsmith.server.hub import Hub
from tinsmith.server.live import LivePages
from tinsmith.server.signatures import UrlSigner
from tinsmith.server.tenants import Tenants
from tinsmith.server.wording import Wording
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.operations import read_metrics
from tinsmith.store.records import Model, Session
from tinsmith.store.shared import SharedCheckpoints
from tinsmith.store.store import Store
from tinsmith.store.uploads import Uploads

Params = ParamSpec("Params")
Result = TypeVar("Result")

_KNOWN_MODELS = 4096
_KNOWN_CURVES = 16
"""Runs whose curves are kept: megabytes of a run of 100,000 steps."""


class Ask(Protocol):
    """Has the hub compute a function of a module, whose first argument it is; raises what that raises.

    Where the hub is in another process, arguments, result and errors are pickled.
    """

    def __call__(
        self,
        function: Callable[Concatenate[Hub, Params], Awaitable[Result]],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Coroutine[Any, Any, Result]:
        """Ask the hub."""
        ...


class Front:
    """The state that routes share in one process."""

    def __init__(self, config: Config, data_dir: Path, store: Stored, base_models: BaseModels, ask: Ask) -> None:
        """Make it in the event loop."""
        self.config = config
        self.data_dir = data_dir
        self.store = store
        self.base_models = base_models
        self.ask = ask
        self.told = Wording(config, data_dir, base_models)
        self.tenants = Tenants(store, lambda: base_models.names)
        self.files = CheckpointFiles(data_dir, config.checkpoint_root, only_read=not config.training.trains)
        self.shared = None if config.training.trains else SharedCheckpoints(self.files)
        """Checkpoints of another server; for one that only samples."""
        self.signer = UrlSigner(data_dir)
        self.uploads = Uploads(data_dir)
        self.applications = Applications()
        self.live = LivePages()
        self.searching = asyncio.Lock()
        """Held by the one search of samples that runs: it takes seconds, of threads that others need."""
        self.bodies = LargeBodies(self.tenants.knows, config.log_format)
        self.run_files = RunFiles(Path(at_home(config.server.run_files))) if config.server.run_files else None
        self._curves: LRUCache[str, tuple[asyncio.Lock, Curves]] = LRUCache(_KNOWN_CURVES)
        self._known_models: LRUCache[str, str] = LRUCache(_KNOWN_MODELS)

    async def refused(self, reason: str, status: int) -> None:
        """Count a request that is answered with an error."""
        await self.ask(calls.count_refusal, reason, status)

    async def session(self, session_id: str) -> Session:
        """The session. Raises NotFoundError."""
        session = await self.store.read(Store.session, session_id)
        if session is None:
            raise NotFoundError(f"session {session_id!r} does not exist")
        return session

    async def model(self, model_id: str) -> Model:
        """The model. Raises NotFoundError."""
        model = await self.store.read(Store.model, model_id)
        if model is None:
            raise NotFoundError(f"model {model_id!r} does not exist")
        return model

    async def require_open_session(self, session_id: str) -> None:
        """Raise as `session`, and UserError for one that is finished."""
        if (await self.session(session_id)).finished_at is not None:
            raise UserError(f"session {session_id} is finished; create a new one")

    async def curves(self, model_id: str) -> Curves:
        """The curves of a run until now. Of a run that was asked for before, the store is asked for what is new."""
        lock, curves = self._curves.setdefault(model_id, (asyncio.Lock(), Curves()))
        async with lock:
            rows = await self.store.read(read_metrics, model_id, curves.read_to)
            await asyncio.to_thread(curves.add, rows)
        return curves

    async def base_of(self, model_id: str) -> str:
        """The base model of a model, as its client named it. Raises as `model`; asks the store once for each."""
        if model_id not in self._known_models:
            self._known_models[model_id] = (await self.model(model_id)).base_model
        return self._known_models[model_id]


def front_beside(hub: Hub, data_dir: Path) -> Front:
    """The front in the process of the hub."""

    async def ask(
        function: Callable[Concatenate[Hub, Params], Awaitable[Result]], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        return await function(hub, *args, **kwargs)

    return Front(hub.config, data_dir, hub.store, hub.base_models, ask)


_OF_PROXIES = ("x-forwarded-for", "x-real-ip", "forwarded", "via")
"""Headers that proxies add."""


def comes_from_here(request: Request) -> bool:
    """Whether the client runs on this machine."""
    client, server = request.client, request.scope.get("server")
    if client is None or server is None or any(name in request.headers for name in _OF_PROXIES):
        return False  # clients of a proxy may be anywhere, and may say that they are here
    return client.host == server[0] or client.host.removeprefix("::ffff:") in ("127.0.0.1", "::1")


def front_of(request: Request) -> Front:
    """The front of this request's server."""
    front: Front = request.app.state.front
    return front
