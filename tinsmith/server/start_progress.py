"""Tells how far an engine's start is. Each step is expected to take what it took the last time."""

import json
import logging
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from tinsmith.errors import reported
from tinsmith.protocol.serving import Starting

log = logging.getLogger(__name__)

FILE = "start_times.json"
"""File in the data directory: seconds of each step when it was last taken."""


class StartProgress:
    """One start after the other."""

    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / FILE
        self._last = _read(self._file)
        self._taken: dict[str, float] = {}
        """Seconds of the finished steps of this start."""
        self._current = Starting("", [])
        self._since = time.monotonic()

    def begin(self) -> None:
        self._taken, self._current, self._since = {}, Starting("", []), time.monotonic()

    def take(self, message: Starting) -> None:
        self._close_step()
        self._current = message

    def finish(self) -> None:
        """End the start, and write down what it took."""
        self._close_step()
        self._current = Starting("", [])
        self._last |= self._taken
        new = self._file.with_suffix(".new")
        with reported(OSError, partial(log.warning, "the next start cannot say how long it takes: %s")):
            new.write_text(json.dumps(self._last, indent=1))
            new.replace(self._file)

    def _close_step(self) -> None:
        now = time.monotonic()
        if self._current.step:
            self._taken[self._current.step] = now - self._since
        self._since = now

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the start; None if they cannot be guessed."""
        steps = [self._current.step, *self._current.to_come]
        if not all(step in self._last for step in steps):
            return None
        current, *later = (self._last[step] for step in steps)
        return max(0.0, current - (time.monotonic() - self._since)) + sum(later)

    @property
    def text(self) -> str:
        """A sentence for people."""
        if not self._current.step:
            return "the engine is starting"
        done, count, left_s = len(self._taken), len(self._taken) + 1 + len(self._current.to_come), self.left_s
        left = "" if left_s is None else f"; about {left_s:.0f} s are left"
        return f"the engine is starting: it {self._current.step} (step {done + 1} of {count}){left}"


def _read(file: Path) -> dict[str, float]:
    """The seconds in the file; none if it is missing or damaged: they are only a guess."""
    known: object = None
    with reported((OSError, ValueError), partial(log.warning, "%s is passed over: %s", file)), suppress(FileNotFoundError):
        known = json.loads(file.read_text())
    steps = known.items() if isinstance(known, dict) else ()
    return {str(step): float(seconds) for step, seconds in steps if isinstance(seconds, int | float)}
