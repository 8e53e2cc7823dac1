"""The engine process: orders the operations of all models, gives them to its workers, and records the outcomes.

It knows models, operations, lengths and versions, never a tensor, and outlives its workers. It never waits for a device
or a file: it sleeps on its sockets, and handles at once whatever arrives.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import get_args

from tinsmith.config import Config
from tinsmith.engine.checkpoints import CheckpointRows
from tinsmith.engine.log_reader import LogReader
from tinsmith.engine.model_state import ModelState, ModelStates
from tinsmith.engine.operations import Operations
from tinsmith.engine.outcomes import Backoff, Recorder
from tinsmith.engine.scheduler import OperationScheduler
from tinsmith.engine.unloading import CANCELLED
from tinsmith.engine.worker_group import WorkerGroup
from tinsmith.errors import ConfigError, StoreUnavailableError, reported
from tinsmith.observing.metrics import ENGINE, QUEUE_AGE, QUEUED, WORKER_RESTARTS, numbers
from tinsmith.observing.spans import MOST, SPANS
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.reports import pause_s
from tinsmith.protocol.serving import (
    Bye,
    CancelSample,
    Done,
    EndSession,
    ForgetCheckpoint,
    Ready,
    Recovering,
    Sample,
    SampleDone,
    SampleEvents,
    SampleFailed,
    SampleStopped,
    Saving,
    Shutdown,
    Starting,
    Status,
    Wake,
)
from tinsmith.protocol.work import WorkerReady
from tinsmith.store.fence import BUSY_S
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.records import LOCAL, Command, CommandKind, Outcome
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

KINDS = get_args(CommandKind)

# Looks what engine and workers do, for the reports to the server.


@dataclass(eq=False)
class StatusBoard:
    """Has a new `Status` for the thread of the `Reports` whenever one is due."""

    scheduler: OperationScheduler
    workers: WorkerGroup
    latest: Status | None = None
    due_at: float = 0.0

    def take(self) -> Status | None:
        """Return what was noted last, once; for another thread."""
        taken, self.latest = self.latest, None
        return taken

    def note(self) -> None:
        """Note what engine and workers do, if that is due; call it often."""
        if time.monotonic() < self.due_at:
            return
        began = time.thread_time()
        scheduler = self.scheduler
        unfinished = {model_id: scheduler.unfinished(model_id) for model_id in scheduler.models}
        self._count(chain.from_iterable(unfinished.values()))
        models = [
            {
                "model_id": model_id,
                "base_model": model.base_model,
                "queued": len(unfinished[model_id]),
                "trained_tokens": scheduler.models[model_id].trained_tokens,
            }
            for model_id, model in scheduler.models.loaded.items()
        ]
        of_workers = self.workers.status
        untaken = self.take()
        spans = [*(untaken.spans if untaken is not None else ()), *SPANS.take(), *self.workers.take_spans()]
        numbers_now = [*numbers(ENGINE), *of_workers.numbers]
        self.latest = replace(of_workers, models=models, numbers=numbers_now, spans=spans[-MOST:])
        self.due_at = time.monotonic() + pause_s(time.thread_time() - began)

    def _count(self, commands: Iterable[Command]) -> None:
        """Count operations by kind and tenant, and find the oldest of each."""
        now = time.time()
        queued, since = Counter[tuple[str, str]](), dict[tuple[str, str], float]()
        for command in commands:
            key = command.kind, self.scheduler.tenant_of(command.model_id)
            queued[key] += 1
            since[key] = min(command.created_at, since.get(key, now))
        QUEUED.clear()
        QUEUE_AGE.clear()
        for kind, tenant in {*queued, *((kind, LOCAL) for kind in KINDS)}:
            QUEUED.labels(kind, tenant).set(queued[kind, tenant])
            QUEUE_AGE.labels(kind, tenant).set(now - since.get((kind, tenant), now))


# The end of the training half when the server stops: what the workers compute is finished, then all models are saved.


class Stopping:
    """Takes the place of the scheduler's `turn`: nothing else is begun or tried again.

    Models of ended sessions are not saved.
    """

    def __init__(self, scheduler: OperationScheduler) -> None:
        self.scheduler = scheduler
        scheduler.stepwise.stops = True
        scheduler.crash_recovery.stop()
        self._end_all()
        for state in scheduler.models.values():
            state.save_again_at = None

    def turn(self, give_up: bool) -> None:
        """Record what the workers have computed, then save one model after the other.

        With `give_up` what waits for the database is lost.
        """
        scheduler = self.scheduler
        scheduler.outcomes.computed(scheduler.forward.take_complete())
        scheduler.crash_recovery.turn()
        self._end_all()  # one that was being made when the stop began may be there now
        put_off = scheduler.stepwise.try_again() if scheduler.waits.backoff.wait_s == 0 or give_up else []
        if scheduler.forward.passes:
            return
        for model_id in list(scheduler.forward.operations):
            scheduler.models[model_id].cancelled += scheduler.forward.cancel(model_id, CANCELLED)
        for state in scheduler.models.values():
            if give_up and (state in put_off or state.is_put_off or state.waits_for_row):
                self._lose_unrecorded(state)
            if state.save_again_at is not None:
                self._lose(state)
            if state.ending == "drop":
                state.is_put_off = False
        for state in scheduler.to_unload():
            if state.ending == "drop":
                scheduler.unloading.unload(state)
            elif not scheduler.models.running:
                scheduler.stepwise.begin_saving(state)

    def _end_all(self) -> None:
        for state in self.scheduler.models.values():
            if state.loaded is not None:
                state.ending = state.ending or "save"

    def _lose_unrecorded(self, state: ModelState) -> None:
        """Give up what a model has that waits for the database, and the model, unless it is lost already."""
        if state.waits_for_row:
            state.forget_save()
        if state.loaded is not None:
            self._lose(state)

    def _lose(self, state: ModelState) -> None:
        """Let go of a model that could not be saved: it is unloaded as it is."""
        log.error("model %s could not be saved and is lost", state.model_id)
        state.running = state.save_again_at = None
        state.forget_save()
        state.ending = "drop"


# The engine itself, turn after turn.

IDLE_S = 1.0
"""Seconds that an idle engine sleeps before it looks whether its server and its workers still live."""

DATABASE_BUSY_S = 0.5
"""Seconds that the engine waits for the database's lock before it goes on with other work."""

WORKER_EXIT_S = 60.0
"""Seconds that a worker may take to end when told to, after its last pass; vLLM servers may need a while."""


class Engine:
    """The operations of all models, and the workers that run them."""

    def __init__(self, config: Config, link: ChildLink, heartbeat: Heartbeat, workers: WorkerGroup) -> None:
        self.config = config
        self.link = link
        self.heartbeat = heartbeat
        self.workers = workers
        heartbeat.worker_busy_s = 0.0
        kept = config.server.kept_operations_mib * 2**20, config.server.kept_first_passes
        self.store = Store.open(Path(config.data_dir), DATABASE_BUSY_S, *kept)
        files = CheckpointFiles(Path(config.data_dir), config.checkpoint_root, only_read=not config.training.trains)
        models = ModelStates(workers.send)
        self.recorder = Recorder(self.store, self._recorded, config.training.max_unrecorded_mib * 2**20)
        rows = CheckpointRows(self.store, files)
        operations = Operations(config, rows, lambda: self.workers.models, models, self.recorder)
        self.scheduler = OperationScheduler(config, workers.count, operations, self.recorder.record, workers.send)
        self.log_reader = LogReader(self.store, self.scheduler)
        self.status = StatusBoard(self.scheduler, workers)
        self.lost: dict[str, str] = {}
        """Models that ended with a worker, and why, until that is in the log."""
        self._is_told_ready = False
        """Whether the server knows that these workers take work."""
        self._has_begun = False
        """Whether an operation has begun, and that is noted."""
        self.reading = Backoff()
        """Back-off for reading the log, and for recording lost models."""
        self.stopping = False

    def run(self, server_pid: int) -> None:
        """Serve until told to stop, or until the server process, our parent, is gone.

        Raises ConfigError if the first workers end before they were ready.
        """
        try:
            while not self.stopping and os.getppid() == server_pid:
                self.receive(self.patience())
                self.turn()
            if self.stopping:
                self._end()
        finally:
            self.workers.stop(WORKER_EXIT_S)
        log.info("the engine stops; %d outcomes could not be recorded", len(self.recorder.waiting))
        self.link.send(Bye())
        self.store.close()

    # ---- What arrives

    def receive(self, timeout_s: float) -> None:
        """Take in what server and workers say; wait for it for at most `timeout_s` seconds."""
        for message in self.link.receive(timeout_s):
            self.handle(message)
        for message in self.workers.receive():
            self.handle_worker(message)
        self.heartbeat.worker_busy_s = self.workers.busy_s
        self.workers.watch()
        reason = self.workers.ended()
        if reason is not None:
            for message in self.workers.last_messages:
                self.handle_worker(message)
            self._worker_ended(reason)
        self.workers.start_if_due()

    def handle(self, message: Message) -> None:
        """Take in one message of the server."""
        match message:
            case Wake():
                self.log_reader.wake(message)
            case Sample() | CancelSample() | ForgetCheckpoint():
                if isinstance(message, Sample):
                    self.scheduler.sessions.sampled(message.session_id)
                # One that has ended gets nothing: `Recovering` tells the server that these samples are lost
                self.workers.send(message)
            case EndSession():
                self.workers.send(message)
                self.log_reader.ended_sessions.append(message)
            case Shutdown():
                self.stopping = True

    def handle_worker(self, message: Message) -> None:
        """Take in one message of the worker."""
        match message:
            case SampleDone() | SampleFailed() | SampleStopped() | SampleEvents() | Starting():
                self.link.send(message)
            case WorkerReady():
                self._tell_ready()
            case _:
                self.scheduler.take(message)

    def _tell_ready(self) -> None:
        """Tell the server once that the workers take work, when all models and their snapshots are back."""
        is_back = self.log_reader.has_taken_over and not (self.lost or self.scheduler.crash_recovery.waiting)
        if self.workers.is_ready and is_back and not self._is_told_ready:
            self._is_told_ready = True
            self.link.send(Ready([facts.to_dict() for facts in self.workers.models.values()]))

    # ---- What is due

    def turn(self) -> None:
        """Read new commands, give the worker what is due, and record what has ended."""
        self.recorder.flush()
        if not self.log_reader.has_taken_over and self.reading.wait_s == 0:
            with self._tried_later("models wait"):
                self.log_reader.take_over()
        self._record_lost()
        if self.log_reader.has_news and not self.has_lost and self.reading.wait_s == 0:
            with self._tried_later("new operations wait"):
                self.log_reader.read()  # what is lost fails with its model in the log and is not to be filed
        self.scheduler.fail_overdue()
        if self._may_train:
            self._train()
        self._tell_ready()
        self.status.note()

    def _train(self) -> None:
        """Let workers train. The first operation is noted before: it may end this engine, and those that follow."""
        if not self._has_begun and self.scheduler.has_due:
            if self.reading.wait_s > 0:
                return
            with self._tried_later("operations wait"):
                self.store.note_begun()
                self._has_begun = True
        if self._has_begun or not self.scheduler.has_due:
            self.scheduler.turn()

    @property
    def has_lost(self) -> bool:
        return bool(self.lost)

    @property
    def _may_train(self) -> bool:
        return self.workers.is_ready and not self.has_lost and not self.recorder.is_full

    def patience(self) -> float:
        """Seconds to wait for a message: not past the time of what is to be done by then."""
        waits = [IDLE_S, self.workers.wait_s]
        waits += [self.recorder.backoff.wait_s] if self.recorder.waiting else []
        waits += (
            [self.reading.wait_s] if self.reading.is_failing and not (self.has_lost and self.recorder.waiting) else []
        )
        waits += [self.scheduler.wait_s] if self._may_train else []
        deadline = self.scheduler.overdue_at
        waits += [] if deadline is None else [max(0.0, deadline - time.monotonic())]
        return min(waits)

    @contextmanager
    def _tried_later(self, what: str) -> Iterator[None]:
        """Run the body, which is tried again at growing intervals while the database is not available."""
        failures: list[StoreUnavailableError] = []
        with reported(StoreUnavailableError, failures.append):
            yield
        if failures:
            log.warning("%s for the database: %s", what, failures[0])
            self.reading.failed()
        else:
            self.reading.succeeded()

    def _recorded(self, outcome: Outcome) -> None:
        self.log_reader.recorded(outcome)
        self.link.send(Done.of(outcome))

    # ---- A worker's end, and ours

    def _worker_ended(self, reason: str) -> None:
        if self.workers.is_hopeless:
            raise ConfigError(f"{reason} before it could take work; its output above says why")
        log.error("%s; another is started in %.0f s", reason, self.workers.wait_s)
        WORKER_RESTARTS.inc()
        self.scheduler.crash_recovery.workers_ended(reason)
        self.lost |= self.scheduler.crash_recovery.take_lost()
        self._is_told_ready = False
        self.link.send(Recovering(reason))

    def _record_lost(self) -> None:
        """Record what ended with a worker, after the outcomes it caused; later, if the database takes nothing."""
        self.lost |= self.scheduler.crash_recovery.take_lost()
        if not self.has_lost or self.recorder.waiting or self.reading.wait_s > 0:
            return
        with self._tried_later("what the worker had waits"):
            failed = self.store.lose_models(self.lost)
            self.lost = {}
            for outcome in failed:
                self._recorded(outcome)

    def _end(self) -> None:
        """Finish the running passes, save all models as those of idle sessions, and record the outcomes that are left.

        A step that was applied and saved must not be called failed by the next server: its client would repeat it. So a
        locked database is waited for, as long as SQLite waits itself.
        """
        deadline = time.monotonic() + BUSY_S
        told = None
        stopping = Stopping(self.scheduler)
        while (self.workers.is_ready and not self.scheduler.is_stopped) or (
            self.recorder.waiting and time.monotonic() < deadline
        ):
            if self.workers.is_ready:
                stopping.turn(give_up=time.monotonic() >= deadline)
            saving = self.scheduler.models.saving
            if saving != told or self.recorder.waiting or self.scheduler.models.wait_for_database:
                told = saving
                self.link.send(Saving())
            self.receive(min(self.patience(), DATABASE_BUSY_S))
            self.recorder.flush()
        for model_id in self.scheduler.crash_recovery.waiting:
            log.warning("model %s could not be saved; it comes back with the next server", model_id)
