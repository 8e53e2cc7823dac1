"""Reads new commands from the log, and gives them to the scheduler."""

from dataclasses import dataclass, field

from tinsmith.engine.scheduler import OperationScheduler
from tinsmith.protocol.serving import EndSession, Wake
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store

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

    @property
    def has_news(self) -> bool:
        """Whether a `read` would do something."""
        return bool(self.unread or self.reads_all or self.ended_sessions)

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
