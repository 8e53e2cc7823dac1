"""The samples that run or wait to be fetched, in memory only.

A client that asks for another gets HTTP 410, and the SDK sends it again.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError, NotFoundError, TinsmithError, UserError
from tinsmith.observing.spans import SAMPLES, SPANS
from tinsmith.protocol.serving import SampleDone, SampleFailed
from tinsmith.server.async_store import AsyncStore
from tinsmith.store import ids
from tinsmith.store.records import SamplingSession
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

_FETCHED_TTL_S = 60.0
"""Seconds that a result is kept after it was sent, in case the reply is lost."""

_BYTES_PER_TOKEN = 64
"""About the memory of a streamed token with its log-probability."""


@dataclass(frozen=True)
class StreamedTokens:
    """New tokens of one sequence of a sample."""

    index: int
    """Its number among the sample's sequences."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token, at the temperature of the request."""


class _Stream:
    """Tokens of a streamed sample, for any number of readers."""

    def __init__(self) -> None:
        self.events: list[StreamedTokens] = []
        self._ended = asyncio.Event()
        self._changed = asyncio.Event()

    def add(self, event: StreamedTokens) -> None:
        self.events.append(event)
        self._wake()

    def end(self) -> None:
        self._ended.set()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, seen: int, pause_s: float = 0.0) -> list[StreamedTokens]:
        """Those behind the `seen` first ones, when there are some and `pause_s` is over; at the end at once, or none.

        No token wakes up a reader that pauses.
        """
        if pause_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), pause_s)
        while len(self.events) == seen and not self._ended.is_set():
            await self._changed.wait()
        return self.events[seen:]


@dataclass(eq=False)
class PendingSample:
    """One asample request that was accepted."""

    request_id: str
    run: int
    """A number for each run, which the engine's messages name: a request id given up and sent again gets another."""
    num_samples: int
    size: int
    """Bytes of the request's body."""
    stream: _Stream | None = None
    """None unless it was started with `stream`."""
    digest: bytes = b""
    outcome: SampleDone | SampleFailed | None = None
    """None while it runs."""
    prompt_tokens: int = 0
    """Those of its text alone."""
    accepted_at: float = field(default_factory=time.monotonic, init=False)
    """Monotonic time."""
    finished_bytes: int = field(default=0, init=False)
    """Bytes of its result once it has finished."""

    def check_repeat(self, digest: bytes) -> None:
        """Raise UserError if a request with this key has another body than the accepted one."""
        if digest != self.digest:
            raise UserError(
                f"sample {self.request_id} was sent with a body of digest {self.digest.hex()[:12]}, "
                f"and now with one of digest {digest.hex()[:12]}: "
                "give every sample of a sampling session a seq_id of its own, and repeat one unchanged"
            )

    @property
    def streamed_tokens(self) -> int:
        """Number of tokens that could be followed so far."""
        return 0 if self.stream is None else sum(len(event.tokens) for event in self.stream.events)

    @property
    def sequence_ids(self) -> list[str]:
        return [ids.sequence_id(self.request_id, index) for index in range(self.num_samples)]


@dataclass(frozen=True)
class _Limit:
    """A limit of unfinished samples: setting, value and unit."""

    setting: str
    value: int
    unit: str

    def check(self, taken: int, more: int, whose: str) -> None:
        if more > self.value:
            raise UserError(
                f"the request has {more} {self.unit}; more than {self.value} are not taken at a time ({self.setting}): "
                "split the request"
            )
        if taken + more > self.value:
            raise BackpressureError(
                f"{taken} {self.unit} of {whose} are unfinished, and the limit is {self.value} ({self.setting}); "
                "send this sample later"
            )


class SampleBook:
    """All samples by request id."""

    def __init__(self, config: ServerConfig) -> None:
        self._ttl_s = config.sample_result_ttl_s
        self._max_finished_bytes = config.max_finished_sample_mib * 2**20
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
        self._unfinished: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        """Sequences and bytes of running samples, by session."""
        self._unfinished_totals = [0, 0]
        """The same of all sessions."""
        self._finished_bytes: Counter[str] = Counter()
        """Bytes of kept results, by session."""
        self._unfetched: dict[str, float] = {}
        """Monotonic time until which each result is kept that was not fetched, in the order in which they came."""
        self._fetched: dict[str, float] = {}
        """The same of fetched results, in the order in which they were sent."""

    @property
    def unfinished(self) -> tuple[int, float | None]:
        """Number of sequences, and the monotonic time at which the oldest request was accepted; None without any."""
        since = (sample.accepted_at for sample in self._samples.values() if sample.outcome is None)
        return self._unfinished_totals[0], next(since, None) if self._unfinished_totals[0] else None

    def find(self, request_id: str) -> PendingSample | None:
        self._drop_expired()
        return self._samples.get(request_id)

    def add(
        self, request_id: str, num_samples: int, size: int, stream: bool = False, digest: bytes = b""
    ) -> PendingSample:
        """Note a new sample; with `stream` its tokens can be followed.

        Raises BackpressureError if too many are unfinished, in all or of its session, and UserError if it is too much
        even alone.
        """
        self._drop_expired()
        session = ids.session_of(request_id)
        amounts = (num_samples, size)
        for limit, unfinished, more in zip(self._of_session, self._unfinished, amounts, strict=True):
            limit.check(unfinished[session], more, f"session {session}")
        for limit, total, more in zip(self._of_all, self._unfinished_totals, amounts, strict=True):
            limit.check(total, more, "all sessions")
        sample = PendingSample(request_id, next(self._runs), num_samples, size, _Stream() if stream else None, digest)
        self._samples[request_id] = sample
        self._count_unfinished(sample, 1)
        return sample

    def remove(self, request_id: str) -> PendingSample | None:
        """Forget a sample that is fetched, given up, or never reached the engine; returns it."""
        sample = self._samples.pop(request_id, None)
        if sample is None:
            return None
        if sample.outcome is None:
            self._count_unfinished(sample, -1)
            if sample.stream is not None:
                sample.stream.end()
        else:
            self._count_finished(sample, -1)
            self._unfetched.pop(request_id, None)
            self._fetched.pop(request_id, None)
        return sample

    def add_tokens(self, events: Iterable[tuple[str, int, int, list[int], list[float]]]) -> None:
        """Take streamed tokens. Those of a run that is over are passed over."""
        for request_id, run, index, tokens, logprobs in events:
            sample = self._samples.get(request_id)
            if sample is not None and sample.run == run and sample.outcome is None and sample.stream is not None:
                sample.stream.add(StreamedTokens(index, tokens, logprobs))

    def fetched(self, request_id: str) -> None:
        """Note that a result was sent: it is not kept much longer."""
        if self._unfetched.pop(request_id, None) is not None:
            self._fetched[request_id] = time.monotonic() + _FETCHED_TTL_S

    def finish(self, outcome: SampleDone | SampleFailed) -> bool:
        """Keep how a sample ended. False for an unknown run."""
        sample = self._samples.get(outcome.request_id)
        if sample is None or sample.outcome is not None or sample.run != outcome.run:
            return False
        self._count_unfinished(sample, -1)
        sample.outcome = outcome
        seconds = time.monotonic() - sample.accepted_at
        ended = "ok" if isinstance(outcome, SampleDone) else outcome.category
        facts = {"request": sample.request_id, "session": ids.session_of(sample.request_id), "outcome": ended}
        SPANS.note("sample", SAMPLES, time.time() - seconds, seconds, **facts, sequences=sample.num_samples)
        sample.finished_bytes = len(outcome.payload) if isinstance(outcome, SampleDone) else len(outcome.error)
        if sample.stream is not None:
            sample.stream.end()
            sample.finished_bytes += _BYTES_PER_TOKEN * sample.streamed_tokens
        self._count_finished(sample, 1)
        self._unfetched[sample.request_id] = time.monotonic() + self._ttl_s
        self._drop_over_limit(sample)
        return True

    def lose_running(self) -> list[str]:
        """Forget what runs: its engine died."""
        lost = [key for key, sample in self._samples.items() if sample.outcome is None]
        for key in lost:
            self.remove(key)
        return lost

    def end_streams(self) -> None:
        """Break off what is followed: the server stops."""
        for sample in self._samples.values():
            if sample.stream is not None:
                sample.stream.end()

    def end_session(self, session_id: str) -> list[str]:
        gone = [key for key in self._samples if ids.session_of(key) == session_id]
        for key in gone:
            self.remove(key)
        return gone

    def _count_unfinished(self, sample: PendingSample, sign: int) -> None:
        session = ids.session_of(sample.request_id)
        for place, amount in enumerate((sample.num_samples, sample.size)):
            self._unfinished_totals[place] += sign * amount
            _add(self._unfinished[place], session, sign * amount)

    def _count_finished(self, sample: PendingSample, sign: int) -> None:
        _add(self._finished_bytes, ids.session_of(sample.request_id), sign * sample.finished_bytes)

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for kept in (self._unfetched, self._fetched):
            while kept and kept[earliest := next(iter(kept))] < now:
                self.remove(earliest)

    def _drop_over_limit(self, newest: PendingSample) -> None:
        """Make room for the newest result: drop fetched ones, then the oldest of the session that keeps the most."""
        while self._finished_bytes.total() > self._max_finished_bytes:
            dropped = next(iter(self._fetched), None)
            if dropped is None:
                ((session, _),) = self._finished_bytes.most_common(1)
                dropped = next(key for key in self._unfetched if ids.session_of(key) == session)
                if dropped == newest.request_id:
                    return  # it is larger than all that others have
                log.warning(
                    (
                        "the result of sample %s is dropped: results that wait to be fetched are over "
                        "max_finished_sample_mib"
                    ),
                    dropped,
                )
            self.remove(dropped)


def error_of(ended: SampleFailed) -> TinsmithError:
    """The error with which a sample has ended."""
    if ended.gone:
        return NotFoundError(ended.error)
    return UserError(ended.error) if ended.category == "user" else TinsmithError(ended.error)


def _add(counter: Counter[str], key: str, amount: int) -> None:
    """Add to a counter that keeps no zeros."""
    counter[key] += amount
    if not counter[key]:
        del counter[key]


# Sampling sessions whose weights exist, each looked up once: samples must not wait for the database.

_PUBLISH_AGAIN = (
    "publish weights again (save_weights_and_get_sampling_client) and sample with the client that this gives. "
    "If the model is lost too, first go on from its newest checkpoint; "
    "weights that are saved under a name outlive the server"
)


class SamplingSessions:
    """Sampling sessions by id."""

    def __init__(self, store: AsyncStore, told: Callable[[str, str | None], str]) -> None:
        """`told` is what clients may read of an error, by its category."""
        self._store = store
        self._told = told
        self._ready: dict[str, SamplingSession] = {}

    async def find(self, sampling_session_id: str) -> SamplingSession:
        """A session whose weights exist. Raises NotFoundError with the reason."""
        session = self._ready.get(sampling_session_id)
        if session is None:
            session = await self._look_up(sampling_session_id)
            self._ready[sampling_session_id] = session
        return session

    async def _look_up(self, sampling_session_id: str) -> SamplingSession:
        session = await self._store.read(Store.sampling_session, sampling_session_id)
        if session is None:
            raise NotFoundError(f"sampling session {sampling_session_id!r} does not exist")
        if session.gone is not None:
            raise NotFoundError(
                f"the weights of sampling session {sampling_session_id} are gone: {self._told(session.gone, None)}; "
                f"{_PUBLISH_AGAIN}"
            )
        if session.snapshot_id is not None:
            saved = await self._store.read(Store.outcome, session.snapshot_id)
            if saved is None and await self._store.read(Store.status, session.snapshot_id) != "dropped":
                raise NotFoundError(
                    f"the weights of sampling session {sampling_session_id} are being saved; wait for its future first"
                )
            if saved is not None and saved.error is not None:
                why = self._told(saved.error, saved.category)
                raise NotFoundError(f"the weights of sampling session {sampling_session_id} could not be saved: {why}")
        return session

    def forget(self, session_id: str) -> None:
        self._ready = {key: ready for key, ready in self._ready.items() if ready.session_id != session_id}

    def forget_snapshots(self) -> None:
        """Forget those of snapshots: their engine has died."""
        self._ready = {key: ready for key, ready in self._ready.items() if ready.snapshot_id is None}
