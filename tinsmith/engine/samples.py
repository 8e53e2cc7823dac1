"""The sampling half of the engine: requests to the sampler of their base model, with the weights that their session is bound to."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.models.full import Weights
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Sample, SampleDone, SampleFailed
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, Sampler, SampleResult
from tinsmith.sampling.turns import Turns
from tinsmith.store import ids
from tinsmith.wire.sample import encode_sample_response, parse_sample_request

log = logging.getLogger(__name__)

STARTED_BYTES = 2**20
"""Bodies of requests that are parsed and rendered between two steps, in bytes; the last one may go beyond."""


@dataclass(frozen=True)
class Sampled:
    """A base model's sampler and the renderer that it shares with the trainer."""

    sampler: Sampler
    renderer: Renderer


@dataclass(frozen=True)
class Started:
    """A sample that its base model's sampler has."""

    message: Sample
    """Without the payload, which nobody needs any more."""
    started_at: float
    """Monotonic time."""


class Samples:
    """What is to be sampled. `send` answers the server.

    Requests wait here as they came, by base model and session. They are parsed and rendered, in turn, when their sampler wants more.
    """

    def __init__(self, bases: Mapping[str, Sampled], snapshots: Snapshots, send: Callable[[Message], None]) -> None:
        self.bases = bases
        self.snapshots = snapshots
        self.send = send
        self.waiting: dict[str, Turns[Sample]] = {name: Turns() for name in bases}
        """By base model."""
        self.started: dict[str, Started] = {}
        """By the name that the sampler knows them by (`_name`)."""
        self.sessions: dict[str, Counter[str]] = {name: Counter() for name in bases}
        """How many each session has in `started`, by base model."""
        self.sampled_tokens = 0
        """Of all requests that are finished."""
        self.finished = 0
        """How many requests are."""
        snapshots.watchers.append(self._publish)
        snapshots.in_use = self._weights_in_use

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do something."""
        return any(base.sampler.has_work or self._next(name) is not None for name, base in self.bases.items())

    def load(self) -> tuple[int, int]:
        """How many sequences are being decoded, and how many wait, on all base models."""
        loads = [base.sampler.load for base in self.bases.values()]
        waiting = sum(message.num_samples for turns in self.waiting.values() for message in turns)
        return sum(running for running, _ in loads), sum(waiting for _, waiting in loads) + waiting

    def add(self, message: Sample) -> None:
        """Let a request wait for its turn, or answer why it cannot be."""
        with failing_into(partial(self._fail, message)):
            self.waiting[message.base_model].add(_session(message), message)

    def cancel(self, request_id: str, run: int) -> None:
        """Stop a sample that nobody waits for. One that has ended is no error."""
        for message in self._cancel(lambda message: (message.request_id, message.run) == (request_id, run)):
            log.debug("cancelled sample=%s", message.request_id)

    def end_session(self, session_id: str) -> None:
        """Stop all samples of a session that is over."""
        cancelled = self._cancel(lambda message: _session(message) == session_id)
        if cancelled:
            log.info("cancelled %d samples of session %s, which has ended", len(cancelled), session_id)

    def _cancel(self, gone: Callable[[Sample], bool]) -> list[Sample]:
        cancelled = [message for turns in self.waiting.values() for message in turns.drop(gone)]
        for name in [name for name, started in self.started.items() if gone(started.message)]:
            message = self._ended(name).message
            self.bases[message.base_model].sampler.cancel(name)
            cancelled.append(message)
        return cancelled

    def step(self) -> None:
        """Give samplers what they want more, and let each that has work do one step; answers the requests that ended."""
        for name, base in self.bases.items():
            self._start_some(name)
            if base.sampler.has_work:
                with failing_into(partial(self._abandon, name)):
                    for event in base.sampler.step():
                        self._end(event)

    def _start_some(self, base_model: str) -> None:
        """Start what is next, but no more than can be rendered between two steps without delaying those that run."""
        size = 0
        while size < STARTED_BYTES and (message := self._next(base_model)) is not None:
            self.waiting[base_model].take(_session(message), message)
            size += len(message.payload)
            with failing_into(partial(self._fail, message)):
                self._start(message)

    def _next(self, base_model: str) -> Sample | None:
        """What its sampler should get now: the next in turn while it wants more, and in any case one of each session."""
        waiting = self.waiting[base_model]
        if not waiting:
            return None
        there = Counter[str]() if self.bases[base_model].sampler.room > 0 else self.sessions[base_model]
        wanted = next((session for session in waiting.sessions if not there[session]), None)
        return None if wanted is None else waiting.first(wanted)

    def _start(self, message: Sample) -> None:
        base = self.bases[message.base_model]
        weights = None if message.weights_id is None else self.snapshots.find(message.base_model, message.weights_id)
        request = parse_sample_request(message.payload)
        rendered = base.renderer.render(request.prompt)
        base.sampler.add(_name(message), request, rendered, weights)
        self.started[_name(message)] = Started(replace(message, payload=b""), time.monotonic())
        self.sessions[message.base_model][_session(message)] += 1

    def _ended(self, name: str) -> Started:
        started = self.started.pop(name)
        sessions, session = self.sessions[started.message.base_model], _session(started.message)
        sessions[session] -= 1
        if not sessions[session]:
            del sessions[session]
        return started

    def _weights_in_use(self) -> set[tuple[str, str]]:
        """Base model and weights id of every request that runs or waits."""
        waiting = [message for turns in self.waiting.values() for message in turns]
        messages = [*waiting, *(started.message for started in self.started.values())]
        return {(message.base_model, message.weights_id) for message in messages if message.weights_id is not None}

    def _publish(self, base_model: str, weights_id: str, weights: Weights) -> None:
        if base_model in self.bases:
            self.bases[base_model].sampler.publish(weights)

    def _abandon(self, base_model: str, error: TinsmithError) -> None:
        self.bases[base_model].sampler.abandon()
        for name in [name for name, started in self.started.items() if started.message.base_model == base_model]:
            self._fail(self._ended(name).message, error)

    def _fail(self, message: Sample, error: TinsmithError) -> None:
        self.send(SampleFailed(message.request_id, message.run, str(error), error.category, isinstance(error, NotFoundError)))
        log.warning("failed sample=%s: %s", message.request_id, error)

    def _end(self, event: SampleEvent) -> None:
        if not isinstance(event, SampleResult | SampleFailure):
            return  # tokens that come before the end: nobody has asked for them
        started = self._ended(event.request_id)
        if isinstance(event, SampleFailure):
            self._fail(started.message, event.error)
            return
        with failing_into(partial(self._fail, started.message)):
            self._finish(event, started)

    def _finish(self, result: SampleResult, started: Started) -> None:
        message = started.message
        payload = encode_sample_response(result.sequences, result.answers, result.cached_tokens)
        self.send(SampleDone(message.request_id, message.run, payload))
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


def _name(message: Sample) -> str:
    """What its sampler knows it by. No two that run have the same: a client may give a sample up and send its request id again."""
    return f"{message.request_id}@{message.run}"


def _session(message: Sample) -> str:
    return ids.session_of(message.request_id)
