"""The `Sampler` of one base model whose samples vLLM servers compute.

`add` hands a request to the client's thread, `step` takes what has come back. Only what needs the trainer's own model happens in the
engine's thread: the canary of weights that are new, and what a request asks about its prompt that vLLM cannot answer.
"""

import logging
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.prefix import BLOCK, prompt_keys, weights_key
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sampler import SampleEvent, SampleFailure, SampleResult, TokensSampled, ref_of
from tinsmith.sampling.vllm.canary import Canary, score_prompt
from tinsmith.sampling.vllm.client import VLLMClient
from tinsmith.sampling.vllm.job import Draft, Job
from tinsmith.sampling.vllm.parameters import check_parameters, longest_answer
from tinsmith.sampling.vllm.version import Version
from tinsmith.wire.prompt_scores import PromptAnswers
from tinsmith.wire.sample import SampleRequest

log = logging.getLogger(__name__)


class VLLMSampler:
    """See `Sampler` (`sampling/local.py`)."""

    def __init__(
        self, base: BaseModel, canary: Canary, client: VLLMClient, longest: int, logits_chunk: int, wake: Callable[[], None]
    ) -> None:
        """Prompt and answer have at most `longest` tokens. `wake` is called in another thread when `step` has something to return."""
        self.base = base
        self.canary = canary
        self.client = client
        self.longest = longest
        self.logits_chunk = logits_chunk
        self.wake = wake
        self.pending: dict[str, _Pending] = {}
        """By request id."""
        self.ended: deque[tuple[str, Future[SampleResult]]] = deque()
        """Filled by the client's thread."""
        self.published: deque[Weights] = deque()
        self.canaries: dict[str, NDArray[np.float32]] = {}
        """The trainer's log-probabilities of the canary, by the key of the weights, as long as these are in memory."""
        self.copies: dict[str, set[int]] = {}
        """The `id` of all objects in memory that hold the weights of a key."""
        self.gone: deque[tuple[str, int]] = deque()
        """Key and `id` of such objects that are no more. Filled by any thread."""

    @property
    def has_work(self) -> bool:
        """See `Sampler`: what vLLM computes is no work for this process."""
        return bool(self.ended or self.published or self.gone)

    @property
    def load(self) -> tuple[int, int]:
        """See `Sampler`. Which of them wait only vLLM knows."""
        return sum(pending.num_samples for pending in self.pending.values()), 0

    @property
    def room(self) -> int:
        """See `Sampler`: as many may wait for a server as it computes at a time."""
        return 2 * sum(server.slots for server in self.client.servers.all) - self.load[0]

    def add(self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None, stream: bool = False) -> None:
        """See `Sampler`."""
        check_parameters(request)
        request.questions.check(len(rendered), self.base.vocab_size)
        version = self._version(weights)
        blocks = len(rendered) // BLOCK
        job = Job(
            request_id=request_id,
            request=request,
            rendered=rendered,
            version=version,
            max_tokens=longest_answer(request, len(rendered), self.longest),
            eos=self.base.eos_token_ids(),
            vocab_size=self.base.vocab_size,
            tokenizer=self.base.tokenizer,
            keys=prompt_keys(weights_key(version.ref), rendered, [], [], blocks),
            answers=self._local_answers(request, rendered, weights),
            drafts=[Draft() for _ in range(request.num_samples)],
        )
        self.pending[request_id] = _Pending(request.num_samples, stream, self.client.submit(job, partial(self._end, request_id)))

    def publish(self, weights: Weights) -> None:
        """See `Sampler`. The next `step` does it, so that who saves them need not wait."""
        self.published.append(weights)

    def step(self) -> list[SampleEvent]:
        """See `Sampler`."""
        self._forget_unused()
        while self.published:
            self.client.publish(self._version(self.published.popleft()))
        events: list[SampleEvent] = []
        while self.ended:
            request_id, future = self.ended.popleft()
            pending = self.pending.get(request_id)
            if pending is not None and pending.future is future:  # or it was cancelled, and perhaps came again
                del self.pending[request_id]
                outcome = _outcome(request_id, future)
                if pending.stream and isinstance(outcome, SampleResult):
                    events += _tokens_of(outcome)
                events.append(outcome)
        return events

    def cancel(self, request_id: str) -> None:
        """See `Sampler`. vLLM gives up what nobody listens to."""
        if request_id in self.pending:
            self.pending.pop(request_id).future.cancel()

    def abandon(self) -> None:
        """See `Sampler`."""
        for request_id in list(self.pending):
            self.cancel(request_id)

    def _end(self, request_id: str, future: "Future[SampleResult]") -> None:
        self.ended.append((request_id, future))
        self.wake()

    def _version(self, weights: Weights | None) -> Version:
        self._forget_unused()
        ref = ref_of(weights, self.base.name)
        if ref.key not in self.canaries:
            self.canaries[ref.key] = self.canary.expected(weights)
        copies = self.copies.setdefault(ref.key, set())
        if weights is not None and id(weights) not in copies:
            copies.add(id(weights))
            weakref.finalize(weights, self.gone.append, (ref.key, id(weights))).atexit = False
        return Version(weights, self.canaries[ref.key], ref)

    def _forget_unused(self) -> None:
        """Take weights off the servers that no object in memory holds any more. Those that left it and came back have another object."""
        while self.gone:
            key, copy = self.gone.popleft()
            self.copies[key].discard(copy)
            if not self.copies[key]:
                del self.copies[key], self.canaries[key]
                self.client.forget(key)

    def _local_answers(self, request: SampleRequest, rendered: RenderedInput, weights: Weights | None) -> PromptAnswers:
        """Log-probabilities of ids of the client's choice, and alternative tokens: vLLM has neither."""
        asked = replace(request.questions, logprobs=False, topk=0, last_n=None)
        if not asked:
            return PromptAnswers()
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        scores = PromptScores(rendered, asked, request.params, seed)
        score_prompt(self.base, rendered, weights, scores, self.logits_chunk)
        return scores.answers


@dataclass(frozen=True)
class _Pending:
    """A request that the client has."""

    num_samples: int
    stream: bool
    future: Future[SampleResult]


def _tokens_of(result: SampleResult) -> Iterator[TokensSampled]:
    """All tokens of a result, as events."""
    for index, sequence in enumerate(result.sequences):
        for span in sequence.versions:
            part = slice(span.start, span.end)
            yield TokensSampled(result.request_id, index, sequence.tokens[part], sequence.logprobs[part], span.version)


def _outcome(request_id: str, future: "Future[SampleResult]") -> SampleEvent:
    if future.cancelled():
        return SampleFailure(request_id, TinsmithError("the sample was given up, because the server stops"))
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TinsmithError):
        return SampleFailure(request_id, error)
    log.error("unexpected error", exc_info=error)
    return SampleFailure(request_id, TinsmithError(f"internal error: {error!r}"))
