"""Sums of what the workers did in the last minutes, and of the tokens that this gave, kept as spans arrive.

The server's trace has the spans themselves. To add up 100,000 of them for every look would take longer than the look.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tinsmith.observing.spans import DEVICE, Span

INTERVAL_S = 5
"""Seconds of an interval."""
KEPT = 120
"""Intervals that are kept: ten minutes."""

ORDER = ("backward", "forward", "optimizer", "sampling", "publishing", "saving", "loading", "compiling", "other")
"""Activities as they are drawn, from below."""
IDLE = "waiting for "
"""Prefix of the activities of a worker that does nothing."""
REASONS = {
    "waiting for requests": "clients have sent no work: they compute something of their own, or there are none",
    "waiting for samplers": "training waits while vLLM servers sample",
    "waiting for images": "images of the next pass are still being decoded",
    "waiting for files": "a checkpoint is being read or written",
    "compiling": "kernels are compiled or captured for shapes that were not seen before",
    "loading": "a model is being made or loaded",
    "saving": "a checkpoint is copied to host memory",
    "publishing": "weights are being handed to the sampler",
    "starting": "the worker starts",
    "other": "messages are handled, and passes are put together",
}
"""Explanations, in plain words, of why a device does not train or sample."""


@dataclass
class _Interval:
    number: int
    """Unix time of its beginning, in intervals."""
    seconds: defaultdict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    """Keyed by worker and activity."""
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """`training` and `sampling`."""


class Phases:
    """Sums of the last minutes."""

    def __init__(self) -> None:
        self._kept: deque[_Interval] = deque(maxlen=KEPT)
        self._totals: dict[str, float] = {}

    def take(self, spans: Iterable[Span], totals: dict[str, float], now: float) -> None:
        """Add spans of workers, and how far the `totals` of tokens have grown, at this Unix time."""
        current = self._at(int(now // INTERVAL_S))
        for kind, total in totals.items():
            if current is not None:
                current.tokens[kind] += total - self._totals.get(kind, 0.0)
        self._totals = totals
        for name, track, began, seconds, facts in spans:
            if track == DEVICE:
                self._add(facts["worker"], name, began, began + seconds)

    def _add(self, worker: int, name: str, began: float, ended: float) -> None:
        first = self._kept[0].number if self._kept else 0
        for number in range(max(int(began // INTERVAL_S), first), int(ended // INTERVAL_S) + 1):
            inside = min(ended, (number + 1) * INTERVAL_S) - max(began, number * INTERVAL_S)
            interval = self._at(number)
            if interval is not None:
                interval.seconds[worker, name] += inside

    def _at(self, number: int) -> _Interval | None:
        """Return an interval, made if it is a later one; None if it is forgotten."""
        if not self._kept or number > self._kept[-1].number + KEPT:
            self._kept.extend(_Interval(each) for each in range(number - KEPT + 1, number + 1))
        while number > self._kept[-1].number:
            self._kept.append(_Interval(self._kept[-1].number + 1))
        at = number - self._kept[0].number
        return self._kept[at] if at >= 0 else None

    def describe(self, now: float) -> dict[str, Any]:
        """Return the intervals until now: shares of each worker's time by activity, and tokens per second."""
        last = int(now // INTERVAL_S) - 1  # the one that runs is not complete
        first = last - KEPT + 1
        known = {each.number: each for each in self._kept}
        empty = _Interval(0)
        each = [known.get(number, empty) for number in range(first, last + 1)]
        workers = sorted({worker for interval in each for worker, _ in interval.seconds})
        return {
            "begins_at": first * INTERVAL_S,
            "interval_s": INTERVAL_S,
            "workers": [{"worker": worker, "activities": _of(worker, each)} for worker in workers],
            "tokens_per_second": {
                kind: [round(interval.tokens.get(kind, 0.0) / INTERVAL_S, 1) for interval in each]
                for kind in ("training", "sampling")
            },
        }


def _of(worker: int, intervals: list[_Interval]) -> dict[str, list[float]]:
    names = sorted({name for interval in intervals for each, name in interval.seconds if each == worker})
    return {
        name: [round(interval.seconds.get((worker, name), 0.0) / INTERVAL_S, 3) for interval in intervals]
        for name in names
    }
