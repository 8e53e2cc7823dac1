"""How long passes take, and how long they may be: short where sessions wait for each other."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from tinsmith.store import ids

log = logging.getLogger(__name__)

SAMPLING_S = 600.0
"""Seconds after a session's sample in which another is expected, so that passes are kept short."""

PASS_S = 1.0
"""Most seconds of the device for a pass, because others wait for its end. A sequence is not divided."""


@dataclass
class Pace:
    """Estimates how long passes of one direction on a base model take, or a worker's share of them.

    Nothing is known before the first one, nor of sequences longer than those computed.
    """

    tokens: float = inf
    """Most tokens of a pass of about `PASS_S`."""
    quick: int = 0
    """The longest sequence of a pass that took less than half of that: two of them may be at the worker."""
    slow: int = 0
    """The longest sequence that took more than `PASS_S` by itself."""

    def learn(self, lengths: Sequence[int], seconds: float) -> None:
        """Take in what a pass of sequences of these lengths took."""
        total, rate = sum(lengths), sum(lengths) / seconds
        if seconds > PASS_S:
            self.tokens = max(1, rate * PASS_S)
        else:
            self.tokens = max(self.tokens, min(2 * total, rate * PASS_S))
        if seconds < PASS_S / 2:
            self.quick = max(self.quick, *lengths)
        else:
            self.quick = min(self.quick, max(lengths) - 1)


class Paces:
    """The paces of all base models."""

    def __init__(self, tokens_per_pass: int, workers: int, is_shared: Callable[[], bool]) -> None:
        """A pass has at most `tokens_per_pass` tokens, of all `workers`.

        `is_shared` says whether sessions may wait for each other. One that is alone is divided into passes in the same way each time.
        """
        self.full: defaultdict[str, int] = defaultdict(lambda: tokens_per_pass)
        """Most tokens of a pass on each base model: fewer than configured after its worker ran out of memory."""
        self.workers = workers
        self._is_shared = is_shared
        self._paces: defaultdict[tuple[str, bool], Pace] = defaultdict(Pace)
        """Pace of each base model, forward and (True) with backward."""

    def clear(self) -> None:
        self.full.clear()
        self._paces.clear()

    def learn(self, base_model: str, backward: bool, lengths: list[int], seconds: float) -> None:
        """Take in what a pass, or a worker's share of it, took."""
        pace = self._paces[base_model, backward]
        pace.learn(lengths, seconds)
        if len(lengths) == 1 and seconds > PASS_S and lengths[0] > pace.slow:
            pace.slow = lengths[0]
            log.warning(
                "a sequence of %d tokens has kept the device for %.3g s (%s): none is cut, so all others wait for one as long",
                *(*lengths, seconds, base_model),
            )

    def is_quick(self, base_model: str, backward: bool, longest: int) -> bool:
        """Whether passes with sequences of up to `longest` tokens keep nobody waiting for long."""
        if not self._is_shared():
            return True
        pace = self._paces[base_model, backward]
        return self.workers * pace.tokens >= self.full[base_model] and longest <= pace.quick

    def most_tokens(self, base_model: str) -> dict[bool, int]:
        """Most tokens of the next pass, forward and (True) with backward."""
        most, is_shared = self.full[base_model], self._is_shared()
        tokens = {each: self.workers * self._paces[base_model, each].tokens for each in (False, True)}
        return {each: int(min(most, paced)) if is_shared else most for each, paced in tokens.items()}


class ActiveSessions:
    """Sessions that train or sample, and may wait for each other."""

    def __init__(self, loaded: Callable[[], Iterable[str]]) -> None:
        """`loaded` returns the ids of loaded models."""
        self._loaded = loaded
        self.sampling: dict[str, float] = {}
        """Sessions that sample, and when they last did (monotonic time), longest ago first."""

    def sampled(self, session_id: str) -> None:
        self.ended(session_id)
        self.sampling[session_id] = time.monotonic()

    def ended(self, session_id: str) -> None:
        self.sampling.pop(session_id, None)

    def are_several(self) -> bool:
        while self.sampling and next(iter(self.sampling.values())) < time.monotonic() - SAMPLING_S:
            del self.sampling[next(iter(self.sampling))]
        return len({*self.sampling, *map(ids.session_of, self._loaded())}) > 1
