"""Reads new commands from the log, and gives them to the scheduler; first what the engine before has left."""

import logging
from dataclasses import dataclass, field

from tinsmith.engine.journal import restored
from tinsmith.engine.scheduler import OperationScheduler
from tinsmith.errors import TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.serving import EndSession, Wake
from tinsmith.store import ids
from tinsmith.store.records import Outcome, StoredHistory
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

READ_AT_ONCE = 1000
"""Commands taken from the log in one read."""


@dataclass(eq=False)
class LogReader:
    """What is new in the log, and sessions that end once all that is there before is filed."""

    store: Store
    scheduler: OperationScheduler
    filed: dict[str, set[int]] = field(default_factory=dict)
    """seq_ids of the commands that are read and not recorded, by model."""
    unread: set[str] = field(default_factory=set)
    reads_all: bool = True
    """Whether other models than `unread` may have new commands too."""
    ended_sessions: list[EndSession] = field(default_factory=list)
    has_taken_over: bool = False
    """Whether the models of the engine before are known."""

    def take_over(self) -> None:
        """Let the models of the engine before come back, as soon as there are workers.

        Raises StoreUnavailableError. A model whose journal is not whole is lost.
        """
        for stored in self.store.histories():
            failures: list[TinsmithError] = []
            with failing_into(failures.append):
                self._take_over(stored)
            for error in failures:
                self.scheduler.crash_recovery.lost[stored.model_id] = f"the engine ended, and {error}"
        self.has_taken_over = True

    def _take_over(self, stored: StoredHistory) -> None:
        state, forward, under_way = restored(stored)
        scheduler, model_id = self.scheduler, stored.model_id
        log.info("model %s is to come back", model_id, extra={"model": model_id})
        scheduler.models[model_id] = state
        scheduler.crash_recovery.waiting[model_id] = stored.comebacks
        for operation in forward:
            scheduler.forward.operations.add(operation)
        if under_way:
            self.filed[model_id] = under_way
        if stored.session_is_over:
            self.ended_sessions.append(EndSession(ids.session_of(model_id), save=True))

    @property
    def has_news(self) -> bool:
        """Whether a `read` would do something."""
        return self.has_taken_over and bool(self.unread or self.reads_all or self.ended_sessions)

    def wake(self, message: Wake) -> None:
        self.unread.update(message.models)
        self.reads_all |= not message.models

    def read(self) -> None:
        """File everything that is new, then end the sessions that have ended.

        Raises StoreUnavailableError; the rest is read next time.
        """
        if self.reads_all or self.ended_sessions:  # there may be commands in the log whose wake-up is still to come
            self.unread.update(self.store.queued_models())
            self.reads_all = False
        for model_id in sorted(self.unread):
            self._read_model(model_id)
            self.unread.discard(model_id)
        for message in self.ended_sessions:
            self.scheduler.unloading.end_session(message.session_id, message.save)
        self.ended_sessions.clear()

    def _read_model(self, model_id: str) -> None:
        more = True
        while more:  # a read that is not full was the last: what is appended after it comes with a wake-up of its own
            filed = self.filed.get(model_id, set())
            commands = self.store.queued(model_id, filed, READ_AT_ONCE)
            for command in commands:
                self.filed.setdefault(model_id, set()).add(command.seq_id)
                self.scheduler.add(command)
            more = len(commands) == READ_AT_ONCE

    def recorded(self, outcome: Outcome) -> None:
        """Forget a command whose outcome is in the log."""
        model_id, _, seq_id = outcome.request_id.rpartition("/")
        filed = self.filed.get(model_id)
        if filed is not None:
            filed.discard(int(seq_id))
            if not filed:
                del self.filed[model_id]
