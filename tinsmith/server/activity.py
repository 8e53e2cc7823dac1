"""The engine's last status, and its tokens per second over the last minute."""

import time
from collections import deque
from typing import Any

from tinsmith.protocol.serving import Status

WINDOW_S = 60.0
"""Rates are averages over so many seconds."""


class Activity:
    """The reports of one engine."""

    def __init__(self) -> None:
        self._last: Status | None = None
        self._counts: deque[tuple[float, int, int]] = deque()
        """Monotonic time, and tokens trained and sampled until then. Only the first entry is older than the window."""

    def take(self, status: Status) -> None:
        """Take in a report."""
        now = time.monotonic()
        if self._last is None:
            self._counts.append((now - WINDOW_S, 0, 0))  # an engine starts at zero
        self._last = status
        self._counts.append((now, status.trained_tokens, status.sampled_tokens))
        self._forget_before(now - WINDOW_S)

    def clear(self) -> None:
        """Forget an engine that has ended: the next one counts from zero."""
        self._last = None
        self._counts.clear()

    def describe(self) -> dict[str, Any]:
        """The reply of the status route."""
        self._forget_before(time.monotonic() - WINDOW_S)
        first, last = (self._counts[0], self._counts[-1]) if self._counts else ((0.0, 0, 0), (0.0, 0, 0))
        status = self._last or Status([], [], 0, 0, 0, 0, {}, {}, {})
        return {
            "models": status.models,
            "workers": status.workers,
            "samples": {"running": status.running_samples, "waiting": status.waiting_samples},
            "tokens_per_second": {
                "training": (last[1] - first[1]) / WINDOW_S,
                "sampling": (last[2] - first[2]) / WINDOW_S,
            },
            "memory_bytes": status.memory,
            "graphs": status.graphs,
            "paging": status.paging,
        }

    def _forget_before(self, start: float) -> None:
        while len(self._counts) > 1 and self._counts[1][0] <= start:
            self._counts.popleft()
