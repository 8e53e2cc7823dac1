"""Samples that run or wait to be fetched. They live in memory only: a client whose sample is lost is told to send it again."""

import itertools
import time
from collections import Counter
from dataclasses import dataclass

from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError, UserError
from tinsmith.protocol.serving import SampleDone, SampleFailed
from tinsmith.store import ids

_FETCHED_TTL_S = 60.0
"""How long a result stays that was sent to its client, in seconds: the reply may have been lost, and is asked for again."""


@dataclass(eq=False)
class PendingSample:
    """One asample request that was accepted."""

    request_id: str
    run: int
    """Which of all runs this server has started. An id that its client gave up and sent again has another, and so have answers to it."""
    num_samples: int
    size: int
    """Bytes of its body."""
    outcome: SampleDone | SampleFailed | None = None
    """None while it runs."""

    @property
    def sequence_ids(self) -> list[str]:
        """One id for each sequence of the reply, in order."""
        return [f"{self.request_id}/{index}" for index in range(self.num_samples)]


@dataclass(frozen=True)
class _Limit:
    """How much may run at a time. A setting, its value, and what it counts."""

    setting: str
    value: int
    unit: str

    def check(self, running: int, more: int, whose: str) -> None:
        if more > self.value:
            raise UserError(
                f"the request has {more} {self.unit}; more than {self.value} are not taken at a time ({self.setting}): split the request"
            )
        if running + more > self.value:
            raise BackpressureError(
                f"{running} {self.unit} of {whose} are unfinished, and the limit is {self.value} ({self.setting}); send this sample later"
            )


class SampleBook:
    """All samples by request id."""

    def __init__(self, config: ServerConfig) -> None:
        """A finished sample is kept for `sample_result_ttl_s` seconds."""
        self._ttl_s = config.sample_result_ttl_s
        self._of_all = (
            _Limit("max_pending_samples", config.max_pending_samples, "sequences"),
            _Limit("max_pending_sample_mib", config.max_pending_sample_mib * 2**20, "bytes"),
        )
        self._of_session = (
            _Limit("max_pending_samples_per_session", config.max_pending_samples_per_session, "sequences"),
            _Limit("max_pending_sample_mib_per_session", config.max_pending_sample_mib_per_session * 2**20, "bytes"),
        )
        self._samples: dict[str, PendingSample] = {}
        self._runs = itertools.count(1)
        self._running: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        """Sequences and bytes of the samples that run, by session."""
        self._totals = [0, 0]
        """Both of all sessions."""
        self._unfetched: dict[str, float] = {}
        """Until when each finished sample is kept (monotonic time), the earliest first."""
        self._fetched: dict[str, float] = {}
        """The same of those whose result was sent to their client."""

    def find(self, request_id: str) -> PendingSample | None:
        """The sample, if it runs or waits to be fetched."""
        self._drop_expired()
        return self._samples.get(request_id)

    def add(self, request_id: str, num_samples: int, size: int) -> PendingSample:
        """Note a new sample whose body has `size` bytes.

        Raises BackpressureError if too many run, of all sessions or of its own, and UserError if it is too much even alone.
        """
        self._drop_expired()
        session = ids.session_of(request_id)
        amounts = (num_samples, size)
        for limit, running, more in zip(self._of_session, self._running, amounts, strict=True):
            limit.check(running[session], more, f"session {session}")
        for limit, total, more in zip(self._of_all, self._totals, amounts, strict=True):
            limit.check(total, more, "all sessions")
        sample = self._samples[request_id] = PendingSample(request_id, next(self._runs), num_samples, size)
        self._count(sample, 1)
        return sample

    def remove(self, request_id: str) -> PendingSample | None:
        """Forget a sample that never reached the engine, that its client gave up, or whose result was fetched; returns it."""
        sample = self._samples.pop(request_id, None)
        if sample is not None and sample.outcome is None:
            self._count(sample, -1)
        self._unfetched.pop(request_id, None)
        self._fetched.pop(request_id, None)
        return sample

    def fetched(self, request_id: str) -> None:
        """The result was sent to its client, so it is not kept much longer."""
        if self._unfetched.pop(request_id, None) is not None:
            self._fetched[request_id] = time.monotonic() + _FETCHED_TTL_S

    def finish(self, outcome: SampleDone | SampleFailed) -> bool:
        """Keep how a sample ended. False for a run that is not known any more."""
        sample = self._samples.get(outcome.request_id)
        if sample is None or sample.outcome is not None or sample.run != outcome.run:
            return False
        sample.outcome = outcome
        self._count(sample, -1)
        self._unfetched[sample.request_id] = time.monotonic() + self._ttl_s
        return True

    def lose_running(self) -> list[str]:
        """Forget what was running: its engine died. Returns its ids."""
        lost = [key for key, sample in self._samples.items() if sample.outcome is None]
        for key in lost:
            self.remove(key)
        return lost

    def end_session(self, session_id: str) -> list[str]:
        """Forget all samples of a session; returns their ids."""
        gone = [key for key in self._samples if ids.session_of(key) == session_id]
        for key in gone:
            self.remove(key)
        return gone

    def _count(self, sample: PendingSample, sign: int) -> None:
        session = ids.session_of(sample.request_id)
        for place, amount in enumerate((sample.num_samples, sample.size)):
            self._totals[place] += sign * amount
            running = self._running[place]
            running[session] += sign * amount
            if not running[session]:
                del running[session]

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for kept in (self._unfetched, self._fetched):
            while kept and kept[earliest := next(iter(kept))] < now:
                self.remove(earliest)
