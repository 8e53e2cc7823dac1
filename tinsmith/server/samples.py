"""Samples that run or wait to be fetched. They live in memory only: a client whose sample is lost is told to send it again."""

import time
from collections import deque
from dataclasses import dataclass

from tinsmith.engine.messages import SampleDone, SampleFailed
from tinsmith.errors import BackpressureError


@dataclass(eq=False)
class PendingSample:
    """One asample request that was accepted."""

    request_id: str
    num_samples: int
    outcome: SampleDone | SampleFailed | None = None
    """None while it runs."""

    @property
    def sequence_ids(self) -> list[str]:
        """One id for each sequence of the reply, in order."""
        return [f"{self.request_id}/{index}" for index in range(self.num_samples)]


class SampleBook:
    """All samples by request id."""

    def __init__(self, max_pending: int, ttl_s: float) -> None:
        """`max_pending` samples may run at a time; a finished one is kept for `ttl_s` seconds."""
        self._max_pending = max_pending
        self._ttl_s = ttl_s
        self._samples: dict[str, PendingSample] = {}
        self._running = 0
        self._finished: deque[tuple[float, PendingSample]] = deque()

    def find(self, request_id: str) -> PendingSample | None:
        """The sample, if it runs or waits to be fetched."""
        self._drop_expired()
        return self._samples.get(request_id)

    def add(self, request_id: str, num_samples: int) -> PendingSample:
        """Note a new sample. Raises BackpressureError if too many run."""
        self._drop_expired()
        if self._running >= self._max_pending:
            raise BackpressureError(f"{self._running} samples are running (max_pending_samples={self._max_pending}); send this one later")
        sample = self._samples[request_id] = PendingSample(request_id, num_samples)
        self._running += 1
        return sample

    def remove(self, request_id: str) -> None:
        """Forget a sample that never reached the engine, or whose result was fetched."""
        sample = self._samples.pop(request_id, None)
        if sample is not None and sample.outcome is None:
            self._running -= 1

    def finish(self, outcome: SampleDone | SampleFailed) -> None:
        """Keep how a sample ended. Samples that are not known any more are ignored."""
        sample = self._samples.get(outcome.request_id)
        if sample is not None and sample.outcome is None:
            sample.outcome = outcome
            self._running -= 1
            self._finished.append((time.monotonic(), sample))

    def lose_running(self) -> list[str]:
        """Forget what was running: its engine died. Returns its ids."""
        lost = [key for key, sample in self._samples.items() if sample.outcome is None]
        for key in lost:
            self.remove(key)
        return lost

    def _drop_expired(self) -> None:
        oldest = time.monotonic() - self._ttl_s
        while self._finished and self._finished[0][0] < oldest:
            _, sample = self._finished.popleft()
            if self._samples.get(sample.request_id) is sample:
                del self._samples[sample.request_id]
