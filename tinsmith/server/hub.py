"""State that the routes share."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

from cachetools import LRUCache
from fastapi import Request

from tinsmith.config import Config
from tinsmith.errors import EngineUnavailableError, NotFoundError, UserError
from tinsmith.observing.spans import SPANS
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.protocol.messages import Message
from tinsmith.protocol.own_directory import boot_name
from tinsmith.protocol.serving import (
    Done,
    EndSession,
    Ready,
    Recovering,
    SampleDone,
    SampleEvents,
    SampleFailed,
    SampleStopped,
    Status,
    Wake,
)
from tinsmith.server.activity import Activity
from tinsmith.server.async_store import AsyncStore
from tinsmith.server.body import LargeBodies
from tinsmith.server.budgets import Budgets
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.lifetimes import Lifetimes
from tinsmith.server.queued_operations import QueuedOperations
from tinsmith.server.replies import private_places, without_paths
from tinsmith.server.sample_journal import SampleJournal
from tinsmith.server.sample_reports import SampleReports
from tinsmith.server.samples import SampleBook, SamplingSessions
from tinsmith.server.signatures import UrlSigner
from tinsmith.server.tenants import Tenants
from tinsmith.server.trace import Exporter, Trace
from tinsmith.server.waiters import Waiters
from tinsmith.store.files import CheckpointFiles, delete_copies_left
from tinsmith.store.lease import take_lease
from tinsmith.store.records import Checkpoint, Model, Outcome, Session, Used
from tinsmith.store.shared import SharedCheckpoints
from tinsmith.store.store import Store

# The base models that the engine serves, as its Ready message described them.


class BaseModels:
    """Base models by name. They stay known while the engine is restarted: the next one serves the same."""

    def __init__(self) -> None:
        self._by_name: dict[str, ModelFacts] = {}

    def replace(self, models: list[dict[str, Any]]) -> None:
        self._by_name = {facts.name: facts for facts in (ModelFacts(**model) for model in models)}

    def all(self) -> list[ModelFacts]:
        """All, in the order of the configuration. Raises EngineUnavailableError before an engine was ready."""
        if not self._by_name:
            raise EngineUnavailableError("the engine is still loading its models; send the request again")
        return list(self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Their names; of none before an engine was ready."""
        return list(self._by_name)

    @property
    def longest(self) -> int | None:
        """The longest context window; None before an engine was ready."""
        return max((facts.max_context for facts in self._by_name.values()), default=None)

    def find(self, name: str, from_here: bool = False) -> ModelFacts:
        """The model that `NAME` or `NAME:suffix` means. Raises NotFoundError, or EngineUnavailableError as `all`.

        A client on this machine (`from_here`) that gives a model's directory is told its name.
        """
        known = {facts.name: facts for facts in self.all()}
        served = self.directories().get(name) if from_here and name not in known else None
        if served is not None:
            raise NotFoundError(
                f"base_model {name!r} is a directory; give the name under which it is served: {served!r}"
            )
        return known[find_base(name, known)]

    def directories(self) -> dict[str, str]:
        """Names by directory, of models that lie in one."""
        return {
            facts.tokenizer_id: facts.name for facts in self._by_name.values() if Path(facts.tokenizer_id).is_absolute()
        }

    def name_of(self, asked: str) -> str:
        """The configured name of the model that `asked` means; `asked` itself if it is not served."""
        with suppress(NotFoundError):
            return find_base(asked, self._by_name)
        return asked


def check_fits(checkpoint: Checkpoint, facts: ModelFacts) -> None:
    """Raise UserError if the checkpoint is of another architecture. The engine compares sizes when it loads."""
    if checkpoint.architecture != facts.architecture:
        raise UserError(
            f"base_model {facts.name!r} is of architecture {facts.architecture}, but {checkpoint.tinker_path} was "
            f"saved for {checkpoint.base_model!r}, of architecture {checkpoint.architecture}; "
            "name one of the same architecture"
        )


# The state of a server, and how a route gets at it.


def place_of(data_dir: Path) -> str:
    """A name for this data directory, in which kept copies lie: a copy of it, or one that was moved, has another.

    Not its device, which may have another number when the machine has started again.
    """
    return f"{data_dir.stat().st_ino}:{data_dir.resolve()}"


def former_place_of(data_dir: Path) -> str:
    """The name in earlier versions, for this start of the machine alone: they did not sync kept copies."""
    found = data_dir.stat()
    return f"{boot_name()}:{found.st_dev}:{found.st_ino}"


_KNOWN_MODELS = 4096


class Hub:
    """The state of a running server."""

    def __init__(self, config: Config, store: Store, data_dir: Path) -> None:
        """Make it in the event loop; `engine.run` starts the engine."""
        self.config = config
        self.store = AsyncStore(store)
        self.base_models = BaseModels()
        self.tenants = Tenants(self.store, lambda: self.base_models.names)
        self.budgets = Budgets(self.store)
        self.creating = asyncio.Lock()
        """Held while models are counted and one is added."""
        self.files = CheckpointFiles(data_dir, config.checkpoint_root, only_read=not config.training.trains)
        self.shared = None if config.training.trains else SharedCheckpoints(self.files)
        """Checkpoints of another server; for one that only samples."""
        self.signer = UrlSigner(data_dir)
        self.waiters: Waiters[Outcome | SampleDone | SampleFailed] = Waiters()
        self.samples = SampleBook(config.server)
        self.sample_reports = SampleReports(config.server.sample_result_ttl_s, SampleJournal(data_dir))
        self.sampling_sessions = SamplingSessions(self.store, self.told)
        self.lifetimes = Lifetimes(config.server, self.store, self.files)
        self.engine = EngineProcess(config, self.take, self.engine_ready, self.engine_absent)
        self.activity = Activity()
        self.trace = Trace()
        endpoint = config.server.otlp_endpoint
        self.exporter = Exporter(endpoint) if endpoint else None
        self.bodies = LargeBodies(self.lifetimes.knows, config.log_format)
        self.queued = QueuedOperations(config.server)
        self._places = private_places(config, data_dir)
        self._data_dir = data_dir
        self._place = place_of(data_dir), former_place_of(data_dir)
        self._known_models: LRUCache[str, str] = LRUCache(_KNOWN_MODELS)
        self._ended: dict[str, bool] = {}
        """Ended sessions that the engine does not know of, and whether it is to save their models."""

    def take(self, message: Message) -> None:
        """Handle a message of the engine."""
        if isinstance(message, Ready):
            self.base_models.replace(message.models)
        elif isinstance(message, Done):
            self.queued.end(message.request_id)
            self.budgets.release(message.request_id, Used(message.tokens, gpu_seconds=message.gpu_seconds))
            self.waiters.deliver(message.request_id, message.outcome)
        elif isinstance(message, Status):
            self.activity.take(message)
            spans = [*message.spans, *SPANS.take()]
            self.trace.take(spans)
            if self.exporter is not None:
                self.exporter.take(spans)
        elif isinstance(message, SampleEvents):
            self.samples.add_tokens(message.tokens)
        elif isinstance(message, Recovering):
            self._lose_samples()
        elif isinstance(message, SampleDone | SampleFailed):
            self._end_sample(message)
        elif isinstance(message, SampleStopped):
            owner = message.tenant, message.base_model, message.session_id
            self.budgets.add(owner, Used(gpu_seconds=message.gpu_seconds))

    def close(self) -> None:
        """End what does not end with the engine."""
        self.bodies.parser.close()
        if self.exporter is not None:
            self.exporter.close()

    def told(self, reason: str, category: str | None = None) -> str:
        """The text of an error for clients, without the server's directories unless it is the client's own ("user")."""
        return reason if category == "user" else without_paths(reason, self._places | self.base_models.directories())

    def _end_sample(self, message: SampleDone | SampleFailed) -> None:
        if not self.samples.finish(message):
            return  # its client gave it up
        if isinstance(message, SampleDone):
            self.budgets.sampled(message.request_id, message.used)
            self.sample_reports.add(message.request_id, "finished", len(message.payload))
        else:
            self.budgets.release(message.request_id)
            self.sample_reports.add(message.request_id, "failed")
        self.waiters.deliver(message.request_id, message)

    async def engine_ready(self) -> None:
        """Tell a new engine what came in while there was none."""
        await self.engine.notify(Wake([]))
        await self._tell_ended()

    async def engine_absent(self, reason: str) -> int:
        """Give up what the next engine cannot go on with; returns the number of that engine."""
        number = await self.store.write(take_lease, self.config.data_dir)
        models = await self.store.write(Store.fail_unfinished, reason, *self._place)
        await self.store.write(lambda _: delete_copies_left(self._data_dir, models))
        unfinished = await self.store.read(Store.unfinished)
        self.queued.replace(unfinished)
        self.budgets.replace(unfinished)
        self.activity.clear()
        self._lose_samples()
        return number

    def _lose_samples(self) -> None:
        """Fail the samples that run. Clients send those again whose weights are still there."""
        for request_id in self.samples.lose_running():
            self.budgets.release(request_id)
            self.sample_reports.add(request_id, "failed")
        self.sampling_sessions.forget_snapshots()
        self.waiters.all_look_again()

    async def end_session(self, session_id: str, save: bool) -> None:
        """End a session finished in the store: cancel samples, drop snapshots, unload models.

        With `save`, models become checkpoints. An engine that is not ready is told later: it may find the session's
        commands in the log.
        """
        self._ended[session_id] = save
        self.lifetimes.ended(session_id)
        self.sampling_sessions.forget(session_id)
        self.sample_reports.forget(session_id)
        for request_id in self.samples.end_session(session_id):
            self.budgets.release(request_id)
            self.waiters.look_again(request_id)
        if self.engine.takes_messages:
            await self._tell_ended()

    async def _tell_ended(self) -> None:
        for session_id, save in list(self._ended.items()):
            await self.engine.notify(EndSession(session_id, save))
            self._ended.pop(session_id, None)

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

    async def base_of(self, model_id: str) -> str:
        """The base model of a model, as its client named it. Raises as `model`; asks the store once for each."""
        if model_id not in self._known_models:
            self._known_models[model_id] = (await self.model(model_id)).base_model
        return self._known_models[model_id]


_OF_PROXIES = ("x-forwarded-for", "x-real-ip", "forwarded", "via")
"""Headers that proxies add."""


def comes_from_here(request: Request) -> bool:
    """Whether the client runs on this machine."""
    client, server = request.client, request.scope.get("server")
    if client is None or server is None or any(name in request.headers for name in _OF_PROXIES):
        return False  # clients of a proxy may be anywhere, and may say that they are here
    return client.host == server[0] or client.host.removeprefix("::ffff:") in ("127.0.0.1", "::1")


def hub_of(request: Request) -> Hub:
    """The hub of this request's server."""
    hub: Hub = request.app.state.hub
    return hub
