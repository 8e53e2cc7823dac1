"""Back-off for failures that go away by themselves: retries soon at first, then at growing intervals."""

import time

FIRST_S = 0.1
LONGEST_S = 5.0
"""Intervals double between these two, in seconds."""


class Backoff:
    """The next attempt at one thing that may fail."""

    def __init__(self) -> None:
        """Begin with a try that is due at once."""
        self._interval_s = 0.0
        self._due_at = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return self._interval_s > 0

    @property
    def wait_s(self) -> float:
        """Seconds until the next attempt; 0 when it is due."""
        return max(0.0, self._due_at - time.monotonic())

    def failed(self) -> None:
        """An attempt has failed."""
        self._interval_s = min(LONGEST_S, 2 * self._interval_s or FIRST_S)
        self._due_at = time.monotonic() + self._interval_s

    def succeeded(self) -> None:
        """An attempt has succeeded: the next one is due at once."""
        self._interval_s = self._due_at = 0.0
