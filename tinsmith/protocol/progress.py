"""Whether a process that is busy gets on, judged from beside by one of its threads: for how long there was no sign of it.

A thread that hangs in a driver or waits for what never comes uses no processor. One that computes does, however long it takes, and so do
the compilers and servers that it starts and waits for. Reading a slow disk is a sign too. Of doubt nothing is concluded: a thread that
hangs and spins is not noticed.
"""

import time
from contextlib import suppress
from pathlib import Path

import psutil

SIGN = 0.01
"""Part of a processor that has to be used between two looks to be a sign, beside what the looking thread uses."""


_THREADS = Path("/proc/self/task")
"""Of this process, on Linux."""


class Progress:
    """Looks of a thread at the process that it runs in."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._process = psutil.Process()
        self._used_s = 0.0
        self._others_s: dict[int, float] = {}
        self.still_s = 0.0
        """How long there has been no sign. It is counted in looks: a process that was stopped itself has not looked."""

    def look(self, since_s: float, waits: bool) -> None:
        """Look again, `since_s` seconds after the last time. `waits`: it has no work, or waits for another process, which is judged itself.

        Always from the same thread.
        """
        used_s = time.process_time() - time.thread_time()
        used, self._used_s = used_s - self._used_s, used_s
        signs = waits or used >= SIGN * since_s or self._waits_for_disk() or self._children_work(since_s)
        self.still_s = 0.0 if signs else self.still_s + since_s

    def _waits_for_disk(self) -> bool:
        """Whether a thread is in the middle of reading or writing (state D): the one that works may wait for it."""
        return any(_state_of(thread) == "D" for thread in _THREADS.glob("*/stat"))

    def _children_work(self, since_s: float) -> bool:
        """Whether processes that it has started, and theirs, use a processor, or come and go."""
        before, self._others_s = self._others_s, {}
        for child in self._process.children(recursive=True):
            try:
                self._others_s[child.pid] = sum(child.cpu_times()[:2])
            except psutil.Error:  # it has just ended
                return True
        if before.keys() != self._others_s.keys():
            return True
        return sum(self._others_s.values()) - sum(before.values()) >= SIGN * since_s


def _state_of(stat: Path) -> str:
    """The state of a thread, a letter; empty if it has just ended."""
    with suppress(OSError):
        return stat.read_text().rpartition(")")[2].split()[0]
    return ""
