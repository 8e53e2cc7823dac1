"""Records the experts that computed sampled tokens of mixtures of experts, so that training can follow them.

They are kept in memory by training run, and found again by the tokens of the sampled sequence: a datum is told apart
from others by its tokens and images alone. An engine that ends takes them along, and then routers choose.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from tinsmith.store import ids
from tinsmith.store.records import SequenceRoutes
from tinsmith.wire.tensors import ExpertIndices

Tokens = NDArray[np.int64]

_RECORD_BYTES = 400
"""Roughly, beside the array."""


@dataclass(frozen=True, eq=False)
class _Recorded:
    length: int
    """Tokens of the sequence."""
    experts: ExpertIndices

    @property
    def size(self) -> int:
        return _RECORD_BYTES + self.experts.nbytes


class RecordedRoutes:
    """Records of at most `max_bytes`, for any thread; the oldest go first."""

    def __init__(self, max_bytes: float) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._lock = Lock()
        self._kept: OrderedDict[tuple[str, bytes], _Recorded] = OrderedDict()
        """By training run and digest of the sequence, the oldest first."""
        self._lengths: dict[str, Counter[int]] = {}
        """How many sequences of each length a training run has."""

    def put(self, run: str, routes: Sequence[SequenceRoutes]) -> None:
        """Keep the experts of sequences that weights of a training run, by its model id, have sampled."""
        with self._lock:
            for each in routes:
                key = run, _digest(each.tokens)
                self._drop(key)
                self._kept[key] = kept = _Recorded(len(each.tokens), each.experts)
                self._lengths.setdefault(run, Counter())[len(each.tokens)] += 1
                self._bytes += kept.size
            while self._bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def find(self, run: str, sequences: Sequence[Tokens]) -> list[ExpertIndices | None]:
        """Return the experts of the longest recorded sequence that each of these begins with, or is."""
        with self._lock:
            lengths = sorted(self._lengths.get(run, ()))
            return [self._longest(run, tokens, lengths) for tokens in sequences]

    def _longest(self, run: str, tokens: Tokens, lengths: Sequence[int]) -> ExpertIndices | None:
        found, digest, start = None, hashlib.blake2b(digest_size=16), 0
        for length in lengths:
            if length > len(tokens):
                break
            digest.update(tokens[start:length].tobytes())
            start = length
            found = self._kept.get((run, digest.digest()), found)
        return None if found is None else found.experts

    def forget_session(self, session_id: str) -> None:
        """Drop what the training runs of an ended session have sampled."""
        with self._lock:
            for key in [key for key in self._kept if ids.session_of(key[0]) == session_id]:
                self._drop(key)

    def _drop(self, key: tuple[str, bytes]) -> None:
        gone = self._kept.pop(key, None)
        if gone is not None:
            run, _ = key
            self._bytes -= gone.size
            lengths = self._lengths[run]
            lengths[gone.length] -= 1
            if not lengths[gone.length]:
                del lengths[gone.length]
            if not lengths:
                del self._lengths[run]


def _digest(tokens: Tokens) -> bytes:
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
