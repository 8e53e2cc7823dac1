"""Records the experts that computed sampled tokens of mixtures of experts, so that training can follow them.

They are kept in memory by training run, and found again by the tokens of the sampled sequence: a datum is told apart
from others by its tokens and images alone. An engine that ends takes them along, and then routers choose.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tinsmith.store import ids
from tinsmith.store.records import SequenceRoutes
from tinsmith.wire.tensors import ExpertIndices

Tokens = NDArray[np.int64]

_RECORD_BYTES = 400
"""Roughly, beside the array."""


class _Records:
    """What the weights of one training run have sampled."""

    def __init__(self) -> None:
        self.kept: OrderedDict[bytes, tuple[int, ExpertIndices]] = OrderedDict()
        """Tokens and experts of each sequence, by its digest; the oldest first."""
        self.lengths = Counter[int]()
        """How many sequences of each length there are."""
        self.bytes = 0

    def put(self, tokens: Tokens, experts: ExpertIndices) -> None:
        digest = _digest(tokens)
        if digest in self.kept:
            self.drop(digest)
        self.kept[digest] = len(tokens), experts
        self.lengths[len(tokens)] += 1
        self.bytes += _RECORD_BYTES + experts.nbytes

    def drop(self, digest: bytes) -> None:
        length, experts = self.kept.pop(digest)
        self.bytes -= _RECORD_BYTES + experts.nbytes
        self.lengths[length] -= 1
        if not self.lengths[length]:
            del self.lengths[length]

    def longest(self, tokens: Tokens, lengths: Sequence[int]) -> ExpertIndices | None:
        """The experts of the longest sequence of ascending `lengths` that these tokens begin with."""
        found, digest, start = None, hashlib.blake2b(digest_size=16), 0
        for length in lengths:
            if length > len(tokens):
                break
            digest.update(tokens[start:length].tobytes())
            start = length
            found = self.kept.get(digest.digest(), found)
        return None if found is None else found[1]


class RecordedRoutes:
    """Records of at most `max_bytes`, for any thread; the oldest of the training run that has most of them go first."""

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._runs: dict[str, _Records] = {}
        """By training run."""

    def put(self, run: str, routes: Sequence[SequenceRoutes]) -> None:
        """Keep the experts of sequences that weights of a training run, by its model id, have sampled."""
        with self._lock:
            records = self._runs.setdefault(run, _Records())
            for each in routes:
                records.put(each.tokens, each.experts)
            while sum(own.bytes for own in self._runs.values()) > self._max_bytes:
                most = max(self._runs, key=lambda run: self._runs[run].bytes)
                self._runs[most].drop(next(iter(self._runs[most].kept)))
                if not self._runs[most].kept:
                    del self._runs[most]

    def find(self, run: str, sequences: Sequence[Tokens]) -> list[ExpertIndices | None]:
        """Return the experts of the longest recorded sequence that each of these begins with, or is."""
        with self._lock:
            records = self._runs.get(run) or _Records()
            lengths = sorted(records.lengths)
            return [records.longest(tokens, lengths) for tokens in sequences]

    def forget_session(self, session_id: str) -> None:
        """Drop what the training runs of an ended session have sampled."""
        with self._lock:
            for run in [run for run in self._runs if ids.session_of(run) == session_id]:
                del self._runs[run]


def _digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
