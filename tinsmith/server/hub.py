"""State that all requests share. It lives in one process, however many answer HTTP (`front.py`)."""

import asyncio
import time
from pathlib import Path
from typing import Literal

from tinsmith.config import Config
from tinsmith.console.phases import Phases
from tinsmith.observing.spans import SPANS
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
from tinsmith.server.base_models import BaseModels
from tinsmith.server.budgets import Budgets
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.kept_samples import KeptSamples
from tinsmith.server.lifetimes import Lifetimes
from tinsmith.server.queued_operations import QueuedOperations
from tinsmith.server.sample_journal import SampleJournal
from tinsmith.server.sample_reports import SampleReports
from tinsmith.server.samples import SampleBook, SamplingSessions
from tinsmith.server.trace import Exporter, Trace
from tinsmith.server.waiters import Waiters
from tinsmith.server.wording import Wording
from tinsmith.store import ids
from tinsmith.store.files import CheckpointFiles, delete_copies_left
from tinsmith.store.lease import take_lease
from tinsmith.store.records import Outcome, Used
from tinsmith.store.store import Store
from tinsmith.store.uploads import Uploads


def place_of(data_dir: Path) -> str:
    """A name for this data directory, in which kept copies lie: a copy of it, or one that was moved, has another.

    Not its device, which may have another number when the machine has started again.
    """
    return f"{data_dir.stat().st_ino}:{data_dir.resolve()}"


def former_place_of(data_dir: Path) -> str:
    """The name in earlier versions, for this start of the machine alone: they did not sync kept copies."""
    found = data_dir.stat()
    return f"{boot_name()}:{found.st_dev}:{found.st_ino}"


class Hub:
    """The state of a running server."""

    def __init__(self, config: Config, store: Store, data_dir: Path) -> None:
        """Make it in the event loop; `engine.run` starts the engine."""
        self.config = config
        self.store = AsyncStore(store)
        self.base_models = BaseModels()
        self.told = Wording(config, data_dir, self.base_models)
        self.budgets = Budgets(self.store)
        self.stopping = asyncio.Event()
        """Set when HTTP servers in other processes are to end."""
        self.creating = asyncio.Lock()
        """Held while models are counted and one is added."""
        self.files = CheckpointFiles(data_dir, config.checkpoint_root, only_read=not config.training.trains)
        self.waiters: Waiters[Outcome | SampleDone | SampleFailed] = Waiters()
        self.samples = SampleBook(config.server)
        self.kept_samples = KeptSamples(config.server.kept_sample_mib * 2**20)
        self.sample_reports = SampleReports(config.server.sample_result_ttl_s, SampleJournal(data_dir))
        self.sampling_sessions = SamplingSessions(self.store, self.told)
        self.lifetimes = Lifetimes(config.server, self.store, self.files, Uploads(data_dir))
        self.engine = EngineProcess(config, self.take, self.engine_ready, self.engine_absent)
        self.activity = Activity()
        self.trace = Trace()
        self.phases = Phases()
        self.started_at = time.time()
        endpoint = config.server.otlp_endpoint
        self.exporter = Exporter(endpoint) if endpoint else None
        self.queued = QueuedOperations(config.server)
        self._data_dir = data_dir
        self._place = place_of(data_dir), former_place_of(data_dir)
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
            self.phases.take(spans, self.activity.tokens, time.time())
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
        if self.exporter is not None:
            self.exporter.close()

    def _end_sample(self, message: SampleDone | SampleFailed) -> None:
        self.kept_samples.end(message)
        if not self.samples.finish(message):
            return  # its client gave it up
        if isinstance(message, SampleDone):
            self.budgets.sampled(message.request_id, message.used)
            self._report(message.request_id, "finished", len(message.payload))
        else:
            self.budgets.release(message.request_id)
            self._report(message.request_id, "failed")
        self.waiters.deliver(message.request_id, message)

    def _report(self, request_id: str, state: Literal["finished", "failed"], size: int = 0) -> None:
        """Report the end of a sample to its client, unless that is an application, which asks for no reports."""
        if ids.is_sample(request_id):
            self.sample_reports.add(request_id, state, size)

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
            self._report(request_id, "failed")
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
