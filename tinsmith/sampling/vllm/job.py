"""A sample request on one server, from weights that stay as they are: all its samples at once."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.sampler import SampleResult, TokensSampled
from tinsmith.sampling.vllm.canary import ServedWeights
from tinsmith.sampling.vllm.generate import ask, generate, send_pictures
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.parameters import sampling_params, scoring_params, truncates
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.replies import prompt_answers, rescored, sequences_of
from tinsmith.wire.prompt_scores import PromptAnswers
from tinsmith.wire.sample import SampledSequence, SampleRequest

T = TypeVar("T")


@dataclass(eq=False)
class Draft:
    """A sample that is computed in pieces (`pieces.py`), as far as it has come. It outlives the server where it began."""

    pieces: list[SampledSequence] = field(default_factory=list)
    """Each from one set of weights, as the continuation of those before it; none is empty."""
    reply: dict[str, Any] | None = None
    """vLLM's reply to the first piece, which also has the answers about the prompt."""
    ended: bool = False
    told: int = 0
    """How many of its tokens have been given out as events."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens sampled so far."""
        return tuple(token for piece in self.pieces for token in piece.tokens)


@dataclass(frozen=True, eq=False)
class Job:
    """A sample request, checked and ready for vLLM."""

    request_id: str
    request: SampleRequest
    rendered: RenderedInput
    served: ServedWeights
    """The weights to begin with."""
    max_tokens: int
    eos: frozenset[int]
    vocab_size: int
    tokenizer: Any
    keys: list[bytes]
    """Of the prompt's full blocks."""
    answers: PromptAnswers
    """The answers about the prompt that the trainer's model has given."""
    tell: Callable[[TokensSampled], None] | None
    """Takes tokens as they come; None if nobody wants them before the end. Called in the client's thread."""
    drafts: list[Draft]
    """One for each sample; they stay empty if the job is not computed in pieces."""


async def sample(publisher: Publisher, instance: Instance, job: Job) -> SampleResult:
    """The job's result. Raises as `Connection.post`, and TinsmithError if the server computes something else than the trainer."""
    async with publisher.serving(instance, job.served) as serving:
        left = deque(range(job.request.num_samples))
        replies = dict(chain.from_iterable(await in_parallel([_some(instance, job, serving.model, left) for _ in left])))
        sequences = list(chain.from_iterable(part for _, (part, _) in sorted(replies.items())))
        if truncates(job.request):
            sequences = await in_parallel([score_again(instance, job, serving.model, (), sequence) for sequence in sequences])
    return result_of(job, sequences, replies[0][1])


async def in_parallel(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. The first error ends the others, and is raised alone: its class decides what happens next."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _some(
    instance: Instance, job: Job, model: str | None, left: deque[int]
) -> list[tuple[int, tuple[list[SampledSequence], dict[str, Any]]]]:
    """Several of the samples that are `left`, in one request: index of the first, samples, vLLM's reply. Nothing if none is left.

    It takes as many as there are free slots, so callers that come later may find none.
    """
    await send_pictures(instance, job.rendered, model)
    if not left:
        return []
    async with instance.slots.reserve(min(len(left), instance.samples_per_request)) as slots:
        taken = [left.popleft() for _ in range(min(slots, len(left)))]
        if not taken:
            return []
        params = sampling_params(job.request, job.max_tokens, job.eos, job.vocab_size, taken[0], len(taken))
        reply = await ask(instance, job.rendered, params, model)
    sequences = sequences_of(reply, len(taken), job.request.topk_sample_logprobs, instance.label, job.served.ref.label)
    return [(taken[0], (sequences, reply))]


async def score_again(
    instance: Instance, job: Job, model: str | None, before: tuple[int, ...], sequence: SampledSequence
) -> SampledSequence:
    """A sample, or the piece of one that follows the tokens `before`, with log-probabilities over the whole vocabulary."""
    topk = job.request.topk_sample_logprobs
    reply = await generate(instance, job.rendered, scoring_params(topk), model, (*before, *sequence.tokens))
    return rescored(sequence, reply["prompt_logprobs"][len(job.rendered) + len(before) :], topk)


def result_of(job: Job, sequences: list[SampledSequence], reply: dict[str, Any]) -> SampleResult:
    """What the client gets. `reply` is vLLM's to the request that asked about the prompt."""
    answers = job.answers
    if job.request.questions.logprobs or job.request.questions.topk:
        asked = prompt_answers(reply["prompt_logprobs"], job.rendered, job.request.questions)
        answers = replace(answers, logprobs=asked.logprobs, topk=asked.topk)
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return SampleResult(job.request_id, sequences, answers, len(job.rendered), cached)
