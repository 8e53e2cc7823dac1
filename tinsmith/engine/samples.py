"""The sampling half of the engine: requests to the sampler of their base model, with the weights that their session is bound to."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tinsmith.engine.boundary import failing_into
from tinsmith.engine.messages import Message, Sample, SampleDone, SampleFailed
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.models.full import Weights
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.local import Sampler
from tinsmith.sampling.sequence import SampleFailure, SampleResult
from tinsmith.store import ids
from tinsmith.wire.sample import encode_sample_response, parse_sample_request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """A base model's sampler and the renderer that it shares with the trainer."""

    sampler: Sampler
    renderer: Renderer


class Samples:
    """What is being sampled. `send` answers the server."""

    def __init__(self, bases: Mapping[str, Sampled], snapshots: Snapshots, send: Callable[[Message], None]) -> None:
        self.bases = bases
        self.snapshots = snapshots
        self.send = send
        self.started: dict[str, tuple[Sample, float]] = {}
        """Requests that run, by id, with when they came (Unix time)."""
        self.sampled_tokens = 0
        """Of all requests that are finished."""
        snapshots.watchers.append(self._publish)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do something."""
        return any(base.sampler.has_work for base in self.bases.values())

    def load(self) -> tuple[int, int]:
        """How many sequences are being decoded, and how many wait, on all base models."""
        loads = [base.sampler.load for base in self.bases.values()]
        return sum(running for running, _ in loads), sum(waiting for _, waiting in loads)

    def add(self, message: Sample) -> None:
        """Start a request, or answer why it cannot be."""
        with failing_into(lambda error: self._fail(message, error)):
            base = self.bases[message.base_model]
            weights = None if message.weights_id is None else self.snapshots.find(message.base_model, message.weights_id)
            request = parse_sample_request(message.payload)
            rendered = base.renderer.render(request.prompt)
            base.sampler.add(message.request_id, request, rendered, weights, _line(message.weights_id))
            self.started[message.request_id] = (message, time.time())

    def cancel(self, request_id: str) -> None:
        """Stop a sample that nobody waits for. One that has ended is no error."""
        if request_id in self.started:
            message, _ = self.started.pop(request_id)
            self.bases[message.base_model].sampler.cancel(request_id)
            log.info("cancelled sample=%s", request_id)

    def step(self) -> None:
        """One step of every sampler that has work; answers the requests that it finished. A step that fails fails all that it worked on."""
        for name, base in self.bases.items():
            if base.sampler.has_work:
                with failing_into(partial(self._abandon, name)):
                    for ended in base.sampler.step():
                        self._end(ended)

    def _publish(self, base_model: str, weights_id: str, weights: Weights) -> None:
        if base_model in self.bases:
            self.bases[base_model].sampler.publish(weights, _line(weights_id))

    def _abandon(self, base_model: str, error: TinsmithError) -> None:
        self.bases[base_model].sampler.abandon()
        for message, _ in [started for started in self.started.values() if started[0].base_model == base_model]:
            del self.started[message.request_id]
            self._fail(message, error)

    def _fail(self, message: Sample, error: TinsmithError) -> None:
        self.send(SampleFailed(message.request_id, str(error), error.category, isinstance(error, NotFoundError)))
        log.warning("failed sample=%s: %s", message.request_id, error)

    def _end(self, ended: SampleResult | SampleFailure) -> None:
        if isinstance(ended, SampleResult):
            self._finish(ended)
        else:
            message, _ = self.started.pop(ended.request_id)
            self._fail(message, ended.error)

    def _finish(self, result: SampleResult) -> None:
        message, started_at = self.started.pop(result.request_id)
        self.send(SampleDone(result.request_id, encode_sample_response(result.sequences, result.answers, result.cached_tokens)))
        tokens = sum(len(sequence.tokens) for sequence in result.sequences)
        self.sampled_tokens += tokens
        log.info(
            "sample=%s weights=%s prompt_tokens=%d tokens=%d seconds=%.3f",
            result.request_id,
            message.weights_id or message.base_model,
            result.prompt_tokens,
            tokens,
            time.time() - started_at,
        )


def _line(weights_id: str | None) -> str | None:
    """What the versions of these weights share if they take each other's place: their id."""
    return weights_id if weights_id is not None and ids.is_inflight(weights_id) else None
