"""Answers workers' questions: mostly about the databases, which are opened on the server's host alone.

SQLite in WAL mode keeps a part of each database in memory that processes of another host do not share.
"""

from functools import cached_property
from pathlib import Path
from threading import Lock

from tinsmith.config import Config
from tinsmith.engine.recorded_routes import RecordedRoutes
from tinsmith.protocol.messages import Message
from tinsmith.protocol.questions import (
    Answered,
    CheckpointRow,
    FindCheckpoint,
    FindMeeting,
    FindRoutes,
    FindSequences,
    ForgetSequences,
    KeepRoutes,
    KeepSequences,
    MeetingPort,
    Routes,
    Sequences,
)
from tinsmith.store import ids
from tinsmith.store.recorded_sequences import RecordedSequences
from tinsmith.store.store import Store


class Records:
    """The databases of a data directory, for the threads that answer workers. Nothing is opened before it is needed."""

    def __init__(self, config: Config) -> None:
        self._directory = Path(config.data_dir)
        self._recorded_bytes = config.sampling.recorded_sequences_gib * 2**30
        self._routes = RecordedRoutes(config.sampling.recorded_routes_gib * 2**30)
        self._lock = Lock()

    @cached_property
    def _store(self) -> Store:
        return Store.open(self._directory)

    @cached_property
    def _recorded(self) -> RecordedSequences:
        return RecordedSequences(self._directory, self._recorded_bytes)

    def open(self) -> tuple[Store, RecordedSequences]:
        """Open what is not open yet. Raises ConfigError if that is not possible."""
        with self._lock:
            return self._store, self._recorded

    def answer(self, question: Message) -> Message:
        """Answer a question of `protocol/questions.py`. Raises as the store does."""
        store, recorded = self.open()
        match question:
            case FindCheckpoint():
                return CheckpointRow.of(store.require_checkpoint(question.path, question.kind))
            case FindSequences():
                return Sequences.of(recorded.find(question.sequence_ids))
            case KeepSequences():
                recorded.put(question.sequences)
            case KeepRoutes():
                if store.tenant_of(ids.session_of(question.run)) == question.tenant:
                    self._routes.put(question.run, question.routes)
            case FindRoutes():
                return Routes.of(self._routes.find(question.run, question.sequences))
            case ForgetSequences():
                recorded.forget_session(question.session_id)
                self._routes.forget_session(question.session_id)
            case _:
                raise TypeError(f"{type(question).__name__} is no question")
        return Answered()

    def close(self) -> None:
        with self._lock:
            opened = [self.__dict__.pop(name) for name in ("_store", "_recorded") if name in self.__dict__]
        for each in opened:
            each.close()


class GroupAnswers:
    """Answers one group of workers, in threads: with the databases, and where its workers meet."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._meeting = MeetingPort("", 0)

    def answer(self, question: Message) -> Message:
        """Answer a worker's question."""
        match question:
            case MeetingPort():
                self._meeting = question
                return Answered()
            case FindMeeting():
                return self._meeting
        return self._records.answer(question)
