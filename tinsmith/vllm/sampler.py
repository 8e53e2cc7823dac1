"""The `Sampler` of one base model whose samples vLLM servers compute.

`add` hands a request to the client's thread, `step` takes what has come back. Only what needs the trainer's own model happens in the
engine's thread: the canary of weights that are new, and what a request asks about its prompt that vLLM cannot answer.
"""

import logging
import secrets
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.prefix import BLOCK, prompt_keys, weights_key
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.sequence import SampleFailure, SampleResult
from tinsmith.vllm.canary import Canary, score_prompt
from tinsmith.vllm.client import VLLMClient
from tinsmith.vllm.gate import BASE
from tinsmith.vllm.job import Draft, Job
from tinsmith.vllm.parameters import check_parameters, longest_answer
from tinsmith.vllm.version import Version
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
        self.jobs: dict[str, tuple[int, Future[SampleResult]]] = {}
        """Number of samples, and what becomes of them, by request id."""
        self.ended: deque[tuple[str, Future[SampleResult]]] = deque()
        """Filled by the client's thread."""
        self.published: deque[tuple[Weights, str | None]] = deque()
        """New weights, and the lines that go on with them."""
        self.canaries: dict[int, NDArray[np.float32]] = {}
        """The trainer's log-probabilities of the canary, by the number of the weights, as long as these live."""

    @property
    def has_work(self) -> bool:
        """See `Sampler`: what vLLM computes is no work for this process."""
        return bool(self.ended or self.published)

    @property
    def load(self) -> tuple[int, int]:
        """See `Sampler`. Which of them wait only vLLM knows."""
        return sum(samples for samples, _ in self.jobs.values()), 0

    @property
    def room(self) -> int:
        """See `Sampler`: as many may wait for a server as it computes at a time."""
        return 2 * sum(server.slots for server in self.client.servers.all) - self.load[0]

    def add(
        self, request_id: str, request: SampleRequest, rendered: RenderedInput, weights: Weights | None, line: str | None = None
    ) -> None:
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
            line=line,
            max_tokens=longest_answer(request, len(rendered), self.longest),
            eos=self.base.eos_token_ids(),
            vocab_size=self.base.vocab_size,
            tokenizer=self.base.tokenizer,
            keys=prompt_keys(weights_key(version.uid), rendered, [], [], blocks),
            answers=self._local_answers(request, rendered, weights),
            drafts=[Draft() for _ in range(request.num_samples)],
        )
        self.jobs[request_id] = (request.num_samples, self.client.submit(job, partial(self._end, request_id)))

    def publish(self, weights: Weights, line: str | None) -> None:
        """See `Sampler`. The next `step` does it, so that who saves them need not wait."""
        self.published.append((weights, line))

    def step(self) -> list[SampleResult | SampleFailure]:
        """See `Sampler`."""
        while self.published:
            weights, line = self.published.popleft()
            self.client.publish(self._version(weights), line)
        results: list[SampleResult | SampleFailure] = []
        while self.ended:
            request_id, future = self.ended.popleft()
            if self.jobs.get(request_id, (0, None))[1] is future:  # or it was cancelled, and perhaps came again
                del self.jobs[request_id]
                results.append(_outcome(request_id, future))
        return results

    def cancel(self, request_id: str) -> None:
        """See `Sampler`. vLLM gives up what nobody listens to."""
        if request_id in self.jobs:
            self.jobs.pop(request_id)[1].cancel()

    def abandon(self) -> None:
        """See `Sampler`."""
        for request_id in list(self.jobs):
            self.cancel(request_id)

    def _end(self, request_id: str, future: "Future[SampleResult]") -> None:
        self.ended.append((request_id, future))
        self.wake()

    def _version(self, weights: Weights | None) -> Version:
        uid = weights.uid if weights is not None else BASE
        if uid not in self.canaries:
            self.canaries[uid] = self.canary.expected(weights)
            if weights is not None:
                weakref.finalize(weights, self._forget, uid).atexit = False
        return Version(weights, self.canaries[uid], self.base.name if weights is None else weights.version)

    def _forget(self, uid: int) -> None:
        del self.canaries[uid]
        self.client.forget(uid)

    def _local_answers(self, request: SampleRequest, rendered: RenderedInput, weights: Weights | None) -> PromptAnswers:
        """Log-probabilities of ids of the client's choice, and alternative tokens: vLLM has neither."""
        asked = replace(request.questions, logprobs=False, topk=0, last_n=None)
        if not asked:
            return PromptAnswers()
        seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        scores = PromptScores(rendered, asked, request.params, seed)
        score_prompt(self.base, rendered, weights, scores, self.logits_chunk)
        return scores.answers


def _outcome(request_id: str, future: "Future[SampleResult]") -> SampleResult | SampleFailure:
    if future.cancelled():
        return SampleFailure(request_id, TinsmithError("the sample was given up, because the server stops"))
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, TinsmithError):
        return SampleFailure(request_id, error)
    log.error("unexpected error", exc_info=error)
    return SampleFailure(request_id, TinsmithError(f"internal error: {error!r}"))
