"""A sample's way from its turn to its sampler.

Large requests are parsed in a thread, new images are decoded in others, and weights that are not in memory are read in
yet others.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from tinsmith.errors import TinsmithError, UserError
from tinsmith.protocol.boundary import failing_into, result_or_error
from tinsmith.protocol.serving import Sample
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Measured, Renderer
from tinsmith.sampling.sampler import Sampler
from tinsmith.sampling.turns import Turns
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, parse_sample_request
from tinsmith.worker.background import SMALL_BYTES, Background, T
from tinsmith.worker.snapshots import Snapshot, Snapshots
from tinsmith.worker.spill import Key

# The samples of one base model: those that wait for their turn, and those that have begun.


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
    wants_routes: bool = False
    """Whether the reply has the experts that computed the tokens."""
    questions: PromptQuestions = field(default_factory=PromptQuestions)
    gpu_seconds: float = 0.0
    """Its part of the seconds of its sampler's steps."""


@dataclass(eq=False)
class SamplingBase:
    """A base model's sampler, and how far each of its samples has come."""

    sampler: Sampler
    renderer: Renderer
    """Shared with the trainer."""
    waiting: Turns[Sample] = field(default_factory=Turns)
    started: dict[str, Started] = field(default_factory=dict)
    """Running samples by `Sample.name`."""
    sessions: Counter[str] = field(default_factory=Counter)
    """Number of running samples by session."""
    tenants: Counter[str] = field(default_factory=Counter)
    """Number of running sequences by tenant."""
    decoding: Counter[str] = field(default_factory=Counter)
    """Running sequences whose images are being decoded, by session."""
    on_the_way: int = 0
    """Running sequences that the sampler has not got yet."""

    @property
    def load(self) -> tuple[int, int]:
        """Number of sequences that are decoded and that wait."""
        running, waiting = self.sampler.load
        return running, waiting + self.on_the_way + sum(message.num_samples for message in self.waiting)

    def next(self, has_room: Callable[[str], bool]) -> Sample | None:
        """Return the next sample, in turn, of a session that `has_room`, or None.

        The tenant with the fewest running sequences goes first: each sequence has an equal part of a step's seconds, so
        that tenants get equal parts of a device, however many sessions they have.

        Beyond what the sampler wants, each session may still have one. What is being decoded takes room from its own
        session only, since pixel values are large.
        """
        if not self.waiting:
            return None
        room = self.sampler.room - self.on_the_way + self.decoding.total()
        for session in sorted(self.waiting.sessions, key=lambda name: self.tenants[self.waiting.first(name).tenant]):
            if has_room(session) and (room > self.decoding[session] * len(self.decoding) or not self.sessions[session]):
                return self.waiting.first(session)
        return None

    def start(self, message: Sample, now: float) -> None:
        """Take the `next` sample out of those that wait."""
        self.waiting.take(message.session_id, message)
        self.started[message.name] = Started(replace(message, payload=b""), now)
        self.sessions[message.session_id] += 1
        self.tenants[message.tenant] += message.num_samples
        self.on_the_way += message.num_samples

    def decode(self, message: Sample) -> None:
        """Note that threads decode its images."""
        self.started[message.name].is_decoded = True
        self.decoding[message.session_id] += message.num_samples

    def decoded(self, started: Started) -> None:
        """Note that no thread decodes its images any more, if one did."""
        if started.is_decoded:
            started.is_decoded = False
            take_from(self.decoding, started.message.session_id, started.message.num_samples)

    def ended(self, name: str) -> Started:
        """Take out a running sample that has ended."""
        started = self.started.pop(name)
        if not started.in_sampler:
            self.on_the_way -= started.message.num_samples
        self.decoded(started)
        take_from(self.sessions, started.message.session_id, 1)
        take_from(self.tenants, started.message.tenant, started.message.num_samples)
        return started

    def cancel(self, gone: Callable[[Sample], bool]) -> tuple[list[Sample], list[Started]]:
        """Stop the samples that are `gone`; returns those that waited, and those that had begun."""
        waited, begun = self.waiting.drop(gone), []
        for name in [name for name, started in self.started.items() if gone(started.message)]:
            started = self.ended(name)
            if started.in_sampler:
                self.sampler.cancel(name)
            begun.append(started)
        return waited, begun


def take_from(counts: Counter[str], key: str, amount: int) -> None:
    """Subtract from a counter that keeps no zeros."""
    counts[key] -= amount
    if not counts[key]:
        del counts[key]


# The way of one sample: it is parsed, measured and rendered, its weights are found, and its sampler gets it.

STARTED_BYTES = 2**20
"""Bytes of one session's bodies in threads, and of small ones parsed between two steps; the last may go beyond."""


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


@dataclass(eq=False)
class SampleAdmission:
    """Renders samples whose turn has come, and gives them to their samplers.

    `fail` is told of a sample that has ended on the way.
    """

    snapshots: Snapshots
    rendering: Background
    images: Background
    disk: Background
    fail: Callable[[Sample, TinsmithError], None]
    rendering_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of bodies that threads parse and render now, by session."""
    needing: dict[Key, list[_Rendered]] = field(default_factory=dict)
    """Samples that wait for weights that are being read."""

    def has_room(self, session: str) -> bool:
        """Whether threads may render more of a session."""
        return self.rendering_bytes[session] < STARTED_BYTES

    def admit(self, base: SamplingBase) -> None:
        """Start what is next, but no more than can be rendered between two steps without delaying those that run."""
        size = 0
        while size < STARTED_BYTES and (message := base.next(self.has_room)) is not None:
            base.start(message, time.monotonic())
            measure = partial(_measure, base, message)
            if len(message.payload) > SMALL_BYTES or _GRAMMAR in message.payload:
                self._in_thread(self.rendering, base, message, measure, partial(self._render, base, message))
            else:
                size += len(message.payload)
                with self._failing(base, message):
                    self._render(base, message, measure())

    def _failing(self, base: SamplingBase, message: Sample) -> AbstractContextManager[None]:
        """Run the body; an error ends the sample, unless it was cancelled meanwhile."""

        def fail(error: TinsmithError) -> None:
            if message.name in base.started:
                self.fail(base.ended(message.name).message, error)

        return failing_into(fail)

    def _in_thread(
        self, threads: Background, base: SamplingBase, message: Sample, work: Callable[[], T], then: Callable[[T], None]
    ) -> None:
        """Let a thread parse or render a request, and go on with the result."""

        def go_on(ended: "Future[T]") -> None:
            take_from(self.rendering_bytes, message.session_id, len(message.payload))
            with self._failing(base, message):
                then(ended.result())

        self.rendering_bytes[message.session_id] += len(message.payload)
        threads.run(work, go_on, message.session_id)

    def _render(self, base: SamplingBase, message: Sample, measured: _Measured) -> None:
        """Render a request, in threads if it has images to decode."""
        if message.name not in base.started:
            return
        if not measured.prompt.pixels:
            self._begin(base, measured.rendered())
            return
        base.decode(message)
        self._in_thread(self.images, base, message, measured.rendered, partial(self._begin, base))

    def _begin(self, base: SamplingBase, rendered: _Rendered) -> None:
        """Give a request to its sampler, or let its weights be read first."""
        message = rendered.message
        if message.name not in base.started:
            return
        started = base.started[message.name]
        base.decoded(started)
        weights = None
        if message.weights_id is not None:
            weights = self.snapshots.find(message.base_model, message.weights_id)
            if weights is None:
                self._read(base, (message.base_model, message.weights_id), rendered)
                return
        asked = message.name, rendered.request, rendered.prompt, weights
        base.sampler.add(*asked, stream=message.stream, tenant=message.tenant)
        started.in_sampler, started.is_recorded = True, rendered.request.record_stability_info
        started.questions, started.wants_routes = rendered.request.questions, rendered.request.rollout_expert_indices
        base.on_the_way -= message.num_samples

    def _read(self, base: SamplingBase, key: Key, rendered: _Rendered) -> None:
        """Read weights in a thread, once for all that need them. Raises NotFoundError if they are gone."""
        if key not in self.needing:
            self.disk.run(self.snapshots.reader(*key), partial(self._read_ended, base, key))
        self.needing.setdefault(key, []).append(rendered)

    def _read_ended(self, base: SamplingBase, key: Key, ended: "Future[Snapshot]") -> None:
        needing = self.needing.pop(key)
        failure = result_or_error(partial(self.snapshots.hold, key, ended.result))
        for rendered in needing:
            with self._failing(base, rendered.message):
                if failure is not None:
                    raise failure
                self._begin(base, rendered)


_GRAMMAR = b'"grammar":'
"""Shows that a body may have a grammar, which can take a second to compile."""


def _measure(base: SamplingBase, message: Sample) -> _Measured:
    renderer = base.renderer
    request = parse_sample_request(message.payload, is_own=True)
    if request.rollout_expert_indices and not renderer.base.follows_experts:
        raise UserError(
            f"rollout_expert_indices=true, but {renderer.base.name} has no experts that can be noted; leave it out"
        )
    base.sampler.prepare(request)
    return _Measured(replace(message, payload=b""), request, renderer.measure(request.prompt), renderer)
