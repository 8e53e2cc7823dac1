"""The sampling half of a worker: gives requests to the sampler of their base model, with the weights of their session.

Requests wait by base model and session. In turn, when their sampler wants more, they are parsed and rendered: large ones are parsed in a
thread, new images are decoded in others, and weights that are not in memory are read in yet others.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.models.full import Weights
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Sample, SampleDone, SampleEvents, SampleFailed
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Measured, Renderer
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, Sampler, SampleResult, TokensSampled
from tinsmith.sampling.turns import Turns
from tinsmith.store import ids
from tinsmith.store.records import RecordedSequence
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, encode_sample_response, parse_sample_request
from tinsmith.worker.background import SMALL_BYTES, Background, T
from tinsmith.worker.records import SequenceRecords
from tinsmith.worker.snapshots import Key, Snapshot, Snapshots

log = logging.getLogger(__name__)

STARTED_BYTES = 2**20
"""Bytes of bodies of one session that threads parse and render at a time, and of small ones parsed between two steps; the last may go
beyond.
"""


@dataclass(frozen=True)
class SamplingBase:
    """A base model's sampler, and the renderer that it shares with the trainer."""

    sampler: Sampler
    renderer: Renderer


@dataclass
class Started:
    """A sample whose turn has come."""

    message: Sample
    """The request without its payload."""
    started_at: float
    in_sampler: bool = False
    """Whether its sampler has it. Until then it is rendered, or its weights are read."""
    is_decoded: bool = False
    """Threads decode its images."""
    is_recorded: bool = False
    questions: PromptQuestions = field(default_factory=PromptQuestions)


@dataclass(frozen=True)
class _Rendered:
    """A request that can be given to its sampler once its weights are there."""

    message: Sample
    request: SampleRequest
    prompt: RenderedInput


@dataclass(frozen=True)
class _Measured:
    """A request that is parsed and checked; its images are not decoded."""

    message: Sample
    request: SampleRequest
    prompt: Measured
    renderer: Renderer

    def rendered(self) -> _Rendered:
        return _Rendered(self.message, self.request, self.renderer.render_measured(self.prompt))


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
    ) -> None:
        self.bases = bases
        self.snapshots = snapshots
        self.rendering = rendering
        self.images = images
        self.disk = disk
        self.recorded = recorded
        self.send = send
        self.waiting: dict[str, Turns[Sample]] = {name: Turns() for name in bases}
        self.started: dict[str, Started] = {}
        """Running samples by `_name`."""
        self.sessions: dict[str, Counter[str]] = {name: Counter() for name in bases}
        """Number of running samples by base model and session."""
        self.rendering_bytes: Counter[str] = Counter()
        """Bytes of bodies that threads parse and render now, by session."""
        self.decoding: dict[str, Counter[str]] = {name: Counter() for name in bases}
        """Running sequences whose images are being decoded, by base model and session."""
        self.on_the_way: Counter[str] = Counter()
        """Running sequences that their sampler has not got yet, by base model."""
        self.needing: dict[Key, list[_Rendered]] = {}
        """Samples that wait for weights that are being read."""
        self.sampled_tokens = 0
        """Tokens of all finished requests."""
        self.finished = 0
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
        return any(base.sampler.has_work or self._next(name) is not None for name, base in self.bases.items())

    def load(self) -> tuple[int, int]:
        """Number of sequences that are decoded and that wait, on all base models."""
        loads = [base.sampler.load for base in self.bases.values()]
        waiting = sum(message.num_samples for turns in self.waiting.values() for message in turns)
        waiting += self.on_the_way.total()
        return sum(running for running, _ in loads), sum(waiting for _, waiting in loads) + waiting

    def add(self, message: Sample) -> None:
        """Let a request wait for its turn."""
        with failing_into(partial(self._fail, message)):
            self.waiting[message.base_model].add(_session(message), message)

    def cancel(self, request_id: str, run: int) -> None:
        """Stop a sample that nobody waits for, if it runs."""
        for message in self._cancel(lambda message: (message.request_id, message.run) == (request_id, run)):
            log.debug("cancelled sample=%s", message.request_id)

    def end_session(self, session_id: str) -> None:
        """Stop all samples of a session that is over."""
        cancelled = self._cancel(lambda message: _session(message) == session_id)
        if cancelled:
            log.info("cancelled %d samples of session %s, which has ended", len(cancelled), session_id)
        self.disk.run(partial(self.recorded.forget_session, session_id), _log_failure)

    def _cancel(self, gone: Callable[[Sample], bool]) -> list[Sample]:
        cancelled = [message for turns in self.waiting.values() for message in turns.drop(gone)]
        for name in [name for name, started in self.started.items() if gone(started.message)]:
            started = self._ended(name)
            if started.in_sampler:
                self.bases[started.message.base_model].sampler.cancel(name)
            cancelled.append(started.message)
        return cancelled

    def step(self) -> None:
        """Start waiting samples, let each sampler that has work do one step, and answer the requests that ended."""
        for name, base in self.bases.items():
            self._start_some(name)
            if base.sampler.has_work:
                with failing_into(partial(self._abandon, name)):
                    self._take(base.sampler)

    def _take(self, sampler: Sampler) -> None:
        """Let a sampler do a step and answer what comes in the middle of it at once; an error of answering is raised behind it."""
        failures: list[TinsmithError] = []

        def deliver(events: Sequence[SampleEvent]) -> None:
            with failing_into(failures.append):
                self._answer(events)

        deliver(sampler.step(deliver))
        if failures:
            raise failures[0]

    def _answer(self, outcomes: Sequence[SampleEvent]) -> None:
        events: list[tuple[str, int, int, list[int], list[float]]] = []
        for event in outcomes:
            if isinstance(event, TokensSampled):
                message = self.started[event.request_id].message
                events.append((message.request_id, message.run, event.index, list(event.tokens), list(event.logprobs)))
            else:
                self._end(event)
        if events:
            self.send(SampleEvents(events))

    # ---- From a request to its sampler

    def _start_some(self, base_model: str) -> None:
        """Start what is next, but no more than can be rendered between two steps without delaying those that run."""
        size = 0
        while size < STARTED_BYTES and (message := self._next(base_model)) is not None:
            self.waiting[base_model].take(_session(message), message)
            self.started[_name(message)] = Started(replace(message, payload=b""), time.monotonic())
            self.sessions[base_model][_session(message)] += 1
            self.on_the_way[base_model] += message.num_samples
            renderer = self.bases[base_model].renderer
            if len(message.payload) > SMALL_BYTES:
                self._in_thread(self.rendering, message, partial(_measure, renderer, message), partial(self._render, message))
            else:
                size += len(message.payload)
                with failing_into(partial(self._fail_started, message)):
                    self._render(message, _measure(renderer, message))

    def _next(self, base_model: str) -> Sample | None:
        """Return the next sample: the next in turn while the sampler wants more, and in any case one of each session.

        What is being decoded takes room from its own session only, since pixel values are large.
        """
        waiting, decoding = self.waiting[base_model], self.decoding[base_model]
        if not waiting:
            return None
        room = self.bases[base_model].sampler.room - self.on_the_way[base_model] + decoding.total()
        for session in waiting.sessions:
            there = self.sessions[base_model][session]
            if self.rendering_bytes[session] < STARTED_BYTES and (room > decoding[session] * len(decoding) or not there):
                return waiting.first(session)
        return None

    def _in_thread(self, threads: Background, message: Sample, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Let a thread parse or render a request, and go on with the result."""

        def go_on(ended: "Future[T]") -> None:
            _take_from(self.rendering_bytes, _session(message), len(message.payload))
            with failing_into(partial(self._fail_started, message)):
                then(ended.result())

        self.rendering_bytes[_session(message)] += len(message.payload)
        threads.run(work, go_on, _session(message))

    def _render(self, message: Sample, measured: "_Measured") -> None:
        """Render a request, in threads if it has images to decode."""
        if _name(message) not in self.started:
            return
        if not measured.prompt.pixels:
            self._begin(measured.rendered())
            return
        self.decoding[message.base_model][_session(message)] += message.num_samples
        self.started[_name(message)].is_decoded = True
        self._in_thread(self.images, message, measured.rendered, self._begin)

    def _no_longer_decoded(self, started: Started) -> None:
        if started.is_decoded:
            started.is_decoded = False
            _take_from(self.decoding[started.message.base_model], _session(started.message), started.message.num_samples)

    def _begin(self, rendered: _Rendered) -> None:
        """Give a request to its sampler, or let its weights be read first."""
        message = rendered.message
        if _name(message) not in self.started:
            return
        started = self.started[_name(message)]
        self._no_longer_decoded(started)
        weights = None
        if message.weights_id is not None:
            key = (message.base_model, message.weights_id)
            weights = self.snapshots.find(*key)
            if weights is None:
                self._read(key, rendered)
                return
        self.bases[message.base_model].sampler.add(_name(message), rendered.request, rendered.prompt, weights, stream=message.stream)
        started.in_sampler, started.is_recorded = True, rendered.request.record_stability_info
        started.questions = rendered.request.questions
        self.on_the_way[message.base_model] -= message.num_samples

    def _read(self, key: Key, rendered: _Rendered) -> None:
        """Read weights in a thread, once for all that need them. Raises NotFoundError if they are gone."""
        if key not in self.needing:
            self.disk.run(self.snapshots.reader(*key), partial(self._read_ended, key))
        self.needing.setdefault(key, []).append(rendered)

    def _read_ended(self, key: Key, ended: "Future[Snapshot]") -> None:
        needing = self.needing.pop(key)
        failures: list[TinsmithError] = []
        with failing_into(failures.append):
            self.snapshots.hold(key, ended.result)
        for rendered in needing:
            with failing_into(partial(self._fail_started, rendered.message)):
                if failures:
                    raise failures[0]
                self._begin(rendered)

    # ---- Ends

    def _ended(self, name: str) -> Started:
        started = self.started.pop(name)
        if not started.in_sampler:
            self.on_the_way[started.message.base_model] -= started.message.num_samples
        self._no_longer_decoded(started)
        _take_from(self.sessions[started.message.base_model], _session(started.message), 1)
        return started

    def _weights_in_use(self) -> set[Key]:
        waiting = [message for turns in self.waiting.values() for message in turns]
        messages = [*waiting, *(started.message for started in self.started.values())]
        return {(message.base_model, message.weights_id) for message in messages if message.weights_id is not None}

    def _publish(self, base_model: str, weights: Weights) -> None:
        if base_model in self.bases:
            self.bases[base_model].sampler.publish(weights)

    def _abandon(self, base_model: str, error: TinsmithError) -> None:
        self.bases[base_model].sampler.abandon()
        for name in [name for name, started in self.started.items() if started.message.base_model == base_model and started.in_sampler]:
            self._fail(self._ended(name).message, error)

    def _fail_started(self, message: Sample, error: TinsmithError) -> None:
        if _name(message) in self.started:
            self._fail(self._ended(_name(message)).message, error)

    def _fail(self, message: Sample, error: TinsmithError) -> None:
        self.send(SampleFailed(message.request_id, message.run, str(error), error.category, isinstance(error, NotFoundError)))
        log.warning("failed sample=%s: %s", message.request_id, error)

    def _end(self, event: SampleResult | SampleFailure) -> None:
        started = self._ended(event.request_id)
        if isinstance(event, SampleFailure):
            self._fail(started.message, event.error)
            return
        with failing_into(partial(self._fail, started.message)):
            self._finish(event, started)

    def _finish(self, result: SampleResult, started: Started) -> None:
        message = started.message
        result.check_finite(started.questions)
        done = SampleDone(message.request_id, message.run, encode_sample_response(result.sequences, result.answers, result.cached_tokens))
        if started.is_recorded:
            self._record(message, result, done)
        else:
            self.send(done)
        tokens = sum(len(sequence.tokens) for sequence in result.sequences)
        self.sampled_tokens += tokens
        self.finished += 1
        log.debug(
            "sample=%s weights=%s prompt_tokens=%d tokens=%d seconds=%.3f",
            message.request_id,
            message.weights_id or message.base_model,
            result.prompt_tokens,
            tokens,
            time.monotonic() - started.started_at,
        )

    def _record(self, message: Sample, result: SampleResult, done: SampleDone) -> None:
        """Record what was sampled in a thread, then answer: a client may train on it as soon as it has the answer."""
        sequences = {
            ids.sequence_id(message.request_id, index): RecordedSequence(
                result.prompt_tokens, np.array(sequence.tokens, dtype=np.int32), np.array(sequence.logprobs, dtype=np.float32)
            )
            for index, sequence in enumerate(result.sequences)
        }

        def answer(ended: "Future[None]") -> None:
            with failing_into(partial(self._fail, message)):
                ended.result()
                self.send(done)

        self.disk.run(partial(self.recorded.put, sequences), answer)


def _log_failure(ended: "Future[None]") -> None:
    with failing_into(lambda error: log.warning("what an ended session recorded stays until it expires: %s", error)):
        ended.result()


def _measure(renderer: Renderer, message: Sample) -> _Measured:
    request = parse_sample_request(message.payload)
    return _Measured(replace(message, payload=b""), request, renderer.measure(request.prompt), renderer)


def _take_from(counts: Counter[str], key: str, amount: int) -> None:
    """Subtract from a counter that keeps no zeros."""
    counts[key] -= amount
    if not counts[key]:
        del counts[key]


def _name(message: Sample) -> str:
    """Return a sample's name in its sampler, unique because a client may send its request id again after giving a sample up."""
    return f"{message.request_id}@{message.run}"


def _session(message: Sample) -> str:
    return ids.session_of(message.request_id)
