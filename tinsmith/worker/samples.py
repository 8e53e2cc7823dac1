"""The sampling half of a worker: lets samplers do their steps, with the weights of each session, and answers what ends.

Requests wait by base model and session, and are rendered in turn, when their sampler wants more (`admission.py`).
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial

import numpy as np

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.models.full import Weights
from tinsmith.observing.metrics import MODEL_SAMPLED_TOKENS, PROMPT_TOKENS, SAMPLED_TOKENS, SAMPLES
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Sample, SampleDone, SampleEvents, SampleFailed, SampleStopped
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled
from tinsmith.store import ids
from tinsmith.store.records import RecordedSequence, SequenceRoutes, Used
from tinsmith.wire.paths import is_path, parse_path
from tinsmith.wire.sample import encode_sample_response
from tinsmith.worker.admission import SampleAdmission, SamplingBase, Started
from tinsmith.worker.background import Background
from tinsmith.worker.records import SequenceRecords
from tinsmith.worker.snapshots import Snapshots
from tinsmith.worker.spill import Key

log = logging.getLogger(__name__)

PutRoutes = Callable[[str, str, Sequence[SequenceRoutes]], None]
"""Records the experts of sequences that weights of a training run, by its model id, have sampled for a tenant."""

# Answers samples that have ended: with what was sampled, which may be recorded first, or with an error.


@dataclass(eq=False)
class SampleResults:
    """Sends the results of samples. `disk` runs what records them."""

    recorded: SequenceRecords
    disk: Background
    send: Callable[[Message], None]
    put_routes: PutRoutes | None = None
    sampled_tokens: int = 0
    """Tokens of all finished requests."""
    finished: int = 0
    sampled_models: set[str] = field(default_factory=set)
    """Models of whose snapshots the sampled tokens are counted."""

    def fail(self, message: Sample, error: TinsmithError) -> None:
        self.send(
            SampleFailed(message.request_id, message.run, str(error), error.category, isinstance(error, NotFoundError))
        )
        SAMPLES.labels(message.base_model, error.category).inc()
        log.warning("failed sample=%s: %s", message.request_id, error, extra={"request": message.request_id})

    def stopped(self, started: Started) -> Sample:
        """Tell what a sample has cost that is cancelled or fails; returns it."""
        message = started.message
        if started.gpu_seconds:
            owner = message.tenant, message.base_model, message.session_id
            self.send(SampleStopped(*owner, started.gpu_seconds))
        return message

    def broken(self, started: Started, error: TinsmithError) -> None:
        """Fail a sample that has begun."""
        self.fail(self.stopped(started), error)

    def finish(self, result: SampleResult, started: Started) -> None:
        """Answer a sample; what cannot be answered fails."""
        with failing_into(partial(self.broken, started)):
            result.check_finite(started.questions)
            if started.is_recorded or result.routes:
                self._record(result, started)
            else:
                self._tell_finished(_done(started, result), result, started)

    def _tell_finished(self, done: SampleDone, result: SampleResult, started: Started) -> None:
        """Answer, count and log a sample."""
        message = started.message
        self.send(done)
        tokens = sum(len(sequence.tokens) for sequence in result.sequences)
        self.sampled_tokens += tokens
        self.finished += 1
        self._count(message, result, tokens)
        log.debug(
            "sample=%s weights=%s prompt_tokens=%d tokens=%d seconds=%.3f",
            message.request_id,
            message.weights_id or message.base_model,
            result.prompt_tokens,
            tokens,
            time.monotonic() - started.started_at,
            extra={"request": message.request_id},
        )

    def _count(self, message: Sample, result: SampleResult, tokens: int) -> None:
        base_model, cached = message.base_model, result.cached_tokens
        SAMPLES.labels(base_model, "ok").inc()
        SAMPLED_TOKENS.labels(base_model).inc(tokens)
        PROMPT_TOKENS.labels(base_model, "yes").inc(cached)
        PROMPT_TOKENS.labels(base_model, "no").inc(result.prompt_tokens - cached)
        if message.weights_id is not None and not is_path(message.weights_id):
            model_id = message.weights_id.rpartition("/")[0]
            self.sampled_models.add(model_id)
            MODEL_SAMPLED_TOKENS.labels(model_id).inc(tokens)

    def _record(self, result: SampleResult, started: Started) -> None:
        """Record what was sampled in a thread, then answer: a client may train on it as soon as it has the answer."""
        message = started.message

        def record() -> SampleDone:
            if started.is_recorded:
                self.recorded.put(_sequences(message, result))
            routes = [None if each is None else each.arrived() for each in result.routes]
            kept = [each for each in routes if each is not None]
            run = training_run(message.weights_id)
            if self.put_routes and run and kept:
                self.put_routes(run, message.tenant, kept)
            return _done(started, result, routes if started.wants_routes else ())

        def answer(ended: "Future[SampleDone]") -> None:
            with failing_into(partial(self.broken, started)):
                self._tell_finished(ended.result(), result, started)

        self.disk.run(record, answer)

    def forget_session(self, session_id: str) -> None:
        """Delete what an ended session has recorded."""
        self.disk.run(partial(self.recorded.forget_session, session_id), _log_failure)


def _sequences(message: Sample, result: SampleResult) -> dict[str, RecordedSequence]:
    return {
        ids.sequence_id(message.request_id, index): RecordedSequence(
            result.prompt_tokens,
            np.array(sequence.tokens, dtype=np.int32),
            np.array(sequence.logprobs, dtype=np.float32),
        )
        for index, sequence in enumerate(result.sequences)
    }


def _done(started: Started, result: SampleResult, routes: Sequence[SequenceRoutes | None] = ()) -> SampleDone:
    message = started.message
    used = Used(
        prefilled_tokens=result.prompt_tokens - result.cached_tokens,
        cached_tokens=result.cached_tokens,
        sampled_tokens=sum(len(sequence.tokens) for sequence in result.sequences),
        gpu_seconds=started.gpu_seconds,
    )
    experts = [None if each is None else each.experts for each in routes]
    response = encode_sample_response(result.sequences, result.answers, result.cached_tokens, experts)
    return SampleDone(message.request_id, message.run, response, asdict(used))


def training_run(weights_id: str | None) -> str | None:
    """Return the model id of the training run that sampled weights are of; None for those of the base."""
    if weights_id is None:
        return None
    return parse_path(weights_id).model_id if is_path(weights_id) else weights_id.rpartition("/")[0]


def _log_failure(ended: "Future[None]") -> None:
    with failing_into(lambda error: log.warning("what an ended session recorded stays until it expires: %s", error)):
        ended.result()


# The samples that wait and run.


class Samples:
    """Samples that wait and run. `send` answers the engine."""

    def __init__(
        self,
        bases: Mapping[str, SamplingBase],
        snapshots: Snapshots,
        rendering: Background,
        images: Background,
        disk: Background,
        recorded: SequenceRecords,
        send: Callable[[Message], None],
        put_routes: PutRoutes | None = None,
    ) -> None:
        """`put_routes` records the experts that computed samples; None where nobody wants them."""
        self.bases = bases
        self.send = send
        self.results = SampleResults(recorded, disk, send, put_routes)
        self.admission = SampleAdmission(snapshots, rendering, images, disk, self.results.fail)
        snapshots.watchers.append(self._publish)
        snapshots.in_use = self._weights_in_use

    def longest(self, base_model: str, otherwise: int) -> int:
        """Most tokens of a prompt and its answer; `otherwise` if the base model is not sampled."""
        return self.bases[base_model].sampler.longest if base_model in self.bases else otherwise

    def check_model(self, base_model: str, shape: LoraShape) -> None:
        """Raise UserError if the sampler cannot sample a model of this shape."""
        if base_model in self.bases:
            self.bases[base_model].sampler.check_model(shape)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do something."""
        return any(
            base.sampler.has_work or base.next(self.admission.has_room) is not None for base in self.bases.values()
        )

    def load(self) -> tuple[int, int]:
        """Number of sequences that are decoded and that wait, on all base models."""
        loads = [base.load for base in self.bases.values()]
        return sum(running for running, _ in loads), sum(waiting for _, waiting in loads)

    def add(self, message: Sample) -> None:
        """Let a request wait for its turn."""
        with failing_into(partial(self.results.fail, message)):
            self.bases[message.base_model].waiting.add(message.session_id, message)

    def cancel(self, request_id: str, run: int) -> None:
        """Stop a sample that nobody waits for, if it runs."""
        for message in self._cancel(lambda message: (message.request_id, message.run) == (request_id, run)):
            log.debug("cancelled sample=%s", message.request_id)

    def end_session(self, session_id: str) -> None:
        """Stop all samples of a session that is over."""
        cancelled = self._cancel(lambda message: message.session_id == session_id)
        if cancelled:
            log.info("cancelled %d samples of session %s, which has ended", len(cancelled), session_id)
        self.results.forget_session(session_id)

    def _cancel(self, gone: Callable[[Sample], bool]) -> list[Sample]:
        cancelled: list[Sample] = []
        for base in self.bases.values():
            waited, begun = base.cancel(gone)
            cancelled += [*waited, *map(self.results.stopped, begun)]
        return cancelled

    def step(self) -> None:
        """Start waiting samples, let each sampler that has work do one step, and answer the requests that ended."""
        for base in self.bases.values():
            self.admission.admit(base)
            if base.sampler.has_work:
                with failing_into(partial(self._abandon, base)):
                    self._take(base)

    def _take(self, base: SamplingBase) -> None:
        """Let a sampler do a step, and answer at once what comes amid it; an error of answering is raised after it."""
        failures: list[TinsmithError] = []
        running, began = [each for each in base.started.values() if each.in_sampler], time.monotonic()

        def deliver(events: Sequence[SampleEvent]) -> None:
            with failing_into(failures.append):
                self._answer(base, events)

        last = base.sampler.step(deliver)
        seconds, sequences = time.monotonic() - began, sum(each.message.num_samples for each in running)
        for each in running:
            each.gpu_seconds += seconds * each.message.num_samples / sequences
        deliver(last)
        if failures:
            raise failures[0]

    def _answer(self, base: SamplingBase, outcomes: Sequence[SampleEvent]) -> None:
        tokens: list[tuple[str, int, int, list[int], list[float]]] = []
        for event in outcomes:
            if isinstance(event, TokensSampled):
                message = base.started[event.request_id].message
                tokens.append((message.request_id, message.run, event.index, list(event.tokens), list(event.logprobs)))
        if tokens:  # before what ends their samples: nobody reads tokens that come behind it
            self.send(SampleEvents(tokens))
        for event in outcomes:
            if isinstance(event, SampleFailure):
                self.results.broken(base.ended(event.request_id), event.error)
            elif isinstance(event, SampleResult):
                self.results.finish(event, base.ended(event.request_id))

    def _abandon(self, base: SamplingBase, error: TinsmithError) -> None:
        base.sampler.abandon()
        for name in [name for name, started in base.started.items() if started.in_sampler]:
            self.results.broken(base.ended(name), error)

    def _weights_in_use(self) -> set[Key]:
        bases = self.bases.values()
        messages = [
            message
            for base in bases
            for message in (*base.waiting, *(started.message for started in base.started.values()))
        ]
        return {(message.base_model, message.weights_id) for message in messages if message.weights_id is not None}

    def _publish(self, base_model: str, weights: Weights) -> None:
        if base_model in self.bases:
            self.bases[base_model].sampler.publish(weights)
