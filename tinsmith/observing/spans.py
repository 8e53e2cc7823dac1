"""What processes did when: spans, which the server keeps for some minutes (`server/trace.py`).

A process notes its spans where the thing happens. They travel with its numbers once a second
(`protocol/reports.py`); what is noted faster than that takes them is dropped, oldest first.
"""

from collections import deque
from typing import Any

Span = tuple[str, str, float, float, dict[str, Any]]
"""What was done; the track on which it is shown; Unix seconds at which it began; seconds; facts, such as `request`."""

OPERATIONS, SAMPLES, DEVICE, PASSES = "operations", "samples", "device", "passes"
"""Tracks. Spans of the first two overlap, and have a `request`; those of passes name `requests`."""

MOST = 4096
"""Spans that wait for the next report."""

SHORTEST_S = 0.001
"""Seconds of an activity that is a span of its own; shorter ones belong to the one before."""


class SpanBuffer:
    """Spans of this process. For any thread."""

    def __init__(self) -> None:
        self._noted: deque[Span] = deque(maxlen=MOST)

    def note(self, name: str, track: str, began: float, seconds: float, **facts: Any) -> None:
        """Note something that has ended."""
        self._noted.append((name, track, began, seconds, facts))

    def take(self) -> list[Span]:
        """Return what was noted since the last call."""
        return [self._noted.popleft() for _ in range(len(self._noted))]


SPANS = SpanBuffer()


class Activities:
    """Turns one activity after the other into spans of a track without gaps."""

    def __init__(self, spans: SpanBuffer, track: str) -> None:
        self._spans = spans
        self._track = track
        self._name = ""
        self._began = self._ended = 0.0

    def ended(self, name: str, began: float, ended: float) -> None:
        """Note an activity between two Unix times, which began when the one before had ended."""
        if self._name and (name == self._name or ended - began < SHORTEST_S):
            self._ended = ended
            return
        self.flush()
        self._name, self._began, self._ended = name, began, ended

    def flush(self) -> None:
        """Note the span that has come together; what follows is another."""
        if self._name:
            self._spans.note(self._name, self._track, self._began, self._ended - self._began)
        self._name = ""
