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
        self._finished: deque[tuple[float, str]] = deque()

    def find(self, request_id: str) -> PendingSample | None:
        """The sample, if it runs or waits to be fetched."""
        self._drop_expired()
        return self._samples.get(request_id)

    def add(self, request_id: str, num_samples: int) -> PendingSample:
        """Note a new sample. Raises BackpressureError if too many run."""
        self._drop_expired()
        pending = len(self._samples) - len(self._finished)
        if pending >= self._max_pending:
            raise BackpressureError(f"{pending} samples are running (max_pending_samples={self._max_pending}); send this one later")
        sample = self._samples[request_id] = PendingSample(request_id, num_samples)
        return sample

    def remove(self, request_id: str) -> None:
        """Forget a sample that never reached the engine."""
        del self._samples[request_id]

    def finish(self, outcome: SampleDone | SampleFailed) -> None:
        """Keep how a sample ended. Samples that are not known any more are ignored."""
        sample = self._samples.get(outcome.request_id)
        if sample is not None and sample.outcome is None:
            sample.outcome = outcome
            self._finished.append((time.monotonic(), outcome.request_id))

    def lose_running(self) -> None:
        """Forget what was running: its engine died."""
        self._samples = {key: sample for key, sample in self._samples.items() if sample.outcome is not None}

    def _drop_expired(self) -> None:
        oldest = time.monotonic() - self._ttl_s
        while self._finished and self._finished[0][0] < oldest:
            del self._samples[self._finished.popleft()[1]]
