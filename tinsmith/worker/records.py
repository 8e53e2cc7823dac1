"""Reads database rows through the engine (`protocol/questions.py`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith.protocol.questions import (
    Answers,
    CheckpointRow,
    FindCheckpoint,
    FindRoutes,
    FindSequences,
    ForgetSequences,
    KeepRoutes,
    KeepSequences,
    Routes,
    Sequences,
)
from tinsmith.store.records import Checkpoint, RecordedSequence, SequenceRoutes
from tinsmith.wire.paths import CheckpointKind
from tinsmith.wire.tensors import ExpertIndices


class SequenceRecords(Protocol):
    """Storage of recorded sequences."""

    def put(self, sequences: Mapping[str, RecordedSequence]) -> None:
        """Record sequences by id."""
        ...

    def forget_session(self, session_id: str) -> None:
        """Delete what an ended session has sampled."""
        ...


class AskedRecords:
    """Database rows of the server's host, for any thread. Each method raises as the store does."""

    def __init__(self, ask: Answers) -> None:
        self._ask = ask

    def require_checkpoint(self, tinker_path: str, kind: CheckpointKind | None = None) -> Checkpoint:
        answer = self._ask(FindCheckpoint(tinker_path, kind))
        assert isinstance(answer, CheckpointRow)
        return answer.checkpoint

    def find(self, sequence_ids: Iterable[str]) -> dict[str, RecordedSequence]:
        """Return those of these recorded sequences that exist."""
        named = sorted(sequence_ids)
        if not named:
            return {}
        answer = self._ask(FindSequences(named))
        assert isinstance(answer, Sequences)
        return answer.sequences

    def put(self, sequences: Mapping[str, RecordedSequence]) -> None:
        self._ask(KeepSequences.of(sequences))

    def put_routes(self, run: str, tenant: str, routes: Sequence[SequenceRoutes]) -> None:
        """Record the experts of sequences that weights of a training run, by its model id, have sampled for a tenant.

        Those that another tenant has sampled of a published checkpoint are dropped.
        """
        self._ask(KeepRoutes.of(run, tenant, routes))

    def find_routes(self, run: str, sequences: Sequence[NDArray[np.int64]]) -> list[ExpertIndices | None]:
        """Return the experts of the longest sampled sequence that each of these begins with; None if there is none."""
        answer = self._ask(FindRoutes.of(run, sequences))
        assert isinstance(answer, Routes)
        return answer.experts

    def forget_session(self, session_id: str) -> None:
        self._ask(ForgetSequences(session_id))
