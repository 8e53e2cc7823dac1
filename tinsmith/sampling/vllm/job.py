"""A sample request on one server: all samples at once, or in segments while weights change or tokens are streamed.

When a model has new weights (`inflight`), the server loads and compares them while it samples. Then vLLM aborts the
samples from the former weights, and each goes on as a request with its tokens so far behind its prompt. (vLLM could
load an adapter in place under the name that it has. But then it reads the files again at every step, goes on with keys
and values of the former weights, and computes with the new ones before they are compared.)

Tokens that were given out while they came stay: if a server is lost, another goes on behind them. vLLM streams no
scores of the prompt, and no log-probabilities over the whole vocabulary with top_k or top_p: then the tokens of a
segment are given out at its end.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.memory.budget import BLOCK
from tinsmith.models.base import BaseModel
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.prefix import first_key, prompt_keys
from tinsmith.sampling.sampler import SampleResult, TokensSampled
from tinsmith.sampling.stopping import stop_rule
from tinsmith.sampling.vllm.generate import REQUEST_PREFIX, ask, generate, generate_stream, send_images
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.protocol import (
    joined_stream,
    prompt_answers,
    rescored,
    sampling_params,
    scoring_params,
    sequences_of,
    truncates,
)
from tinsmith.sampling.vllm.publisher import Loaded, Publisher
from tinsmith.sampling.vllm.verify import PublishedWeights
from tinsmith.store.records import LOCAL
from tinsmith.wire.prompt_scores import PromptAnswers, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, VersionSpan

T = TypeVar("T")


@dataclass(eq=False)
class Draft:
    """A sample that is computed in segments, as far as it has come. It outlives the server where it began."""

    segments: list[SampledSequence] = field(default_factory=list)
    """Each from one set of weights, behind those before it; none is empty."""
    reply: dict[str, Any] | None = None
    """vLLM's reply to the first segment, which also answers about the prompt."""
    ended: bool = False
    told: int = 0
    """Number of its tokens that have been given out."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.tokens)


@dataclass(eq=False)
class Job:
    """A sample request, checked and ready for vLLM."""

    request_id: str
    request: SampleRequest
    rendered: RenderedInput
    published: PublishedWeights
    """The weights to begin with."""
    max_tokens: int
    base: BaseModel
    answers: PromptAnswers
    """Answers about the prompt by the trainer's model."""
    tell: Callable[[TokensSampled], None] | None
    """Takes tokens as they come, in the client's thread; None if they are wanted at the end only."""
    tenant: str = LOCAL

    def __post_init__(self) -> None:
        first = first_key(self.published.ref, self.tenant)
        self.keys = prompt_keys(first, self.rendered, [], [], len(self.rendered) // BLOCK)
        """Keys of the prompt's full blocks."""
        self.drafts = [Draft() for _ in range(self.request.num_samples)]
        """One for each sample; without segments if the job is computed at once."""

    def params(self, first: int, count: int, done: int = 0) -> dict[str, Any]:
        """Return vLLM's parameters for the samples [first, first + count), of which `done` tokens are known."""
        eos, vocabulary = self.base.eos_token_ids(), self.base.vocab_size
        return sampling_params(self.request, self.max_tokens - done, eos, vocabulary, first, count, done)


async def sample(publisher: Publisher, instance: Instance, job: Job) -> SampleResult:
    """Return the job's result.

    Raises as `Connection.post`, and TinsmithError if the server computes something else than the trainer.
    """
    async with publisher.using(instance, job.published) as loaded:
        left, found = deque(range(job.request.num_samples)), dict[int, SampledSequence]()
        await in_parallel([_some(instance, job, loaded.model, left, found) for _ in left])
        sequences = [found[index] for index in range(job.request.num_samples)]
        if truncates(job.request):
            sequences = await in_parallel(
                [score_again(instance, job, loaded.model, (), sequence) for sequence in sequences]
            )
    return result_of(job, sequences)


async def in_parallel(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all, in order.

    The first error ends the others, and is raised alone: its class decides what happens next.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _some(
    instance: Instance, job: Job, model: str | None, left: deque[int], found: dict[int, SampledSequence]
) -> None:
    """Compute several of the samples that are `left` in one request, as many as there are free slots.

    Later callers may find none left.
    """
    await send_images(instance, job.rendered, model)
    if not left:
        return
    # vLLM refuses several greedy samples in one request
    most = instance.samples_per_request if job.request.params.temperature else 1
    async with instance.slots.reserve(min(len(left), most)) as slots:
        taken = [left.popleft() for _ in range(min(slots, len(left)))]
        if not taken:
            return
        reply = await ask(instance, job.rendered, job.params(taken[0], len(taken)), model, tenant=job.tenant)
    sequences = sequences_of(
        reply, len(taken), job.request.topk_sample_logprobs, instance.label, job.published.ref.label
    )
    found.update(zip(taken, sequences, strict=True))
    job.drafts[taken[0]].reply = reply


async def score_again(
    instance: Instance, job: Job, model: str | None, before: tuple[int, ...], sequence: SampledSequence
) -> SampledSequence:
    """Score a sample, or a segment behind the tokens `before`, over the whole vocabulary."""
    topk = job.request.topk_sample_logprobs
    answer = *before, *sequence.tokens
    reply = await generate(instance, job.rendered, scoring_params(topk), model, answer, tenant=job.tenant)
    return rescored(sequence, reply["prompt_logprobs"][len(job.rendered) + len(before) :], topk)


def result_of(job: Job, sequences: list[SampledSequence]) -> SampleResult:
    """Return what the client gets. The reply to the first sample answers about the prompt."""
    answers, reply = job.answers, job.drafts[0].reply
    assert reply is not None, "the first sample has ended"
    if job.request.questions.logprobs or job.request.questions.topk:
        asked = prompt_answers(reply["prompt_logprobs"], job.rendered, job.request.questions)
        answers = replace(answers, logprobs=asked.logprobs, topk=asked.topk)
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return SampleResult(job.request_id, sequences, answers, len(job.rendered), cached)


# In segments

_AGAIN_S = 0.05
"""Seconds until vLLM is told again to abort a sample, which may not have begun when it was told."""


class NewestWeights:
    """The newest weights of one model, which its inflight samples follow."""

    def __init__(self, published: PublishedWeights) -> None:
        self.published = published
        self.followers = 0
        """Number of jobs that follow them."""
        self.replaced = asyncio.Event()
        """Set when `published` is replaced; there is another for the next time."""

    def replace(self, published: PublishedWeights) -> None:
        self.published = published
        self.replaced.set()
        self.replaced = asyncio.Event()


async def sample_in_segments(publisher: Publisher, instance: Instance, job: Job, newest: NewestWeights) -> SampleResult:
    """Return the job's result; its drafts may have begun on another server. Raises as `sample`."""
    await in_parallel([_finish(publisher, instance, job, newest, index) for index in range(job.request.num_samples)])
    sequences = [joined(job, draft) for draft in job.drafts]
    for index, sequence in enumerate(sequences):
        _tell_rest(job, index, sequence)
    return result_of(job, sequences)


async def _finish(publisher: Publisher, instance: Instance, job: Job, newest: NewestWeights, index: int) -> None:
    """Go on with one sample to its end, whatever weights come meanwhile."""
    draft = job.drafts[index]
    while not draft.ended and len(draft.tokens) < job.max_tokens:
        published, replaced = newest.published, newest.replaced
        async with publisher.using(instance, published) as loaded:
            reply = None
            if not replaced.is_set():  # while it waited for its turn
                replacement = _prepare(publisher, instance, newest, replaced)
                reply = await _until(replacement, instance, partial(_generate, instance, job, published, loaded, index))
            if reply is not None:
                (segment,) = sequences_of(
                    reply, 1, job.request.topk_sample_logprobs, instance.label, published.ref.label, may_be_aborted=True
                )
                if truncates(job.request) and segment.tokens:
                    segment = await score_again(instance, job, loaded.model, draft.tokens, segment)
        if reply is not None:  # and the weights were compared
            draft.ended = reply["choices"][0]["finish_reason"] != "abort"
            _append(job, index, segment, reply)


def _append(job: Job, index: int, segment: SampledSequence, reply: dict[str, Any]) -> None:
    """Add a segment to a draft, and give out what can be given out of it."""
    draft = job.drafts[index]
    if not segment.tokens:
        return
    if _may_tell(job, draft):
        start = draft.told - len(draft.tokens)
        _tell(job, index, segment.tokens[start:], segment.logprobs[start:], segment.versions[0].version)
    draft.reply = draft.reply or reply
    draft.segments.append(segment)


async def _generate(
    instance: Instance, job: Job, published: PublishedWeights, loaded: Loaded, index: int, name: str
) -> dict[str, Any]:
    """Compute one segment: vLLM's reply to a request that goes on behind the tokens so far."""
    draft = job.drafts[index]
    done = draft.tokens
    params = job.params(index, 1, len(done))
    if not _may_stream(instance, job, draft, params):
        return await generate(instance, job.rendered, params, loaded.model, done, name, job.tenant)
    await loaded.compared
    chunks: list[dict[str, Any]] = []
    with ExitStack() as broken:
        broken.callback(_keep_told, job, index, chunks, published)  # whatever ends it: what was given out stays
        asked = job.rendered, params, loaded.model, done, name, job.tenant
        async with aclosing(generate_stream(instance, *asked)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                for choice in chunk["choices"]:
                    logprobs = (
                        [entry["logprob"] for entry in choice["logprobs"]["content"]] if choice["token_ids"] else []
                    )
                    _tell(job, index, choice["token_ids"], logprobs, published.ref.label)
        reply = joined_stream(chunks)
        broken.pop_all()
    return reply


def _may_stream(instance: Instance, job: Job, draft: Draft, params: dict[str, Any]) -> bool:
    """Return whether the next segment can be streamed. vLLM 0.26 is not asked for streams."""
    return (
        job.tell is not None
        and instance.label is not None
        and "prompt_logprobs" not in params
        and not truncates(job.request)
        and _may_tell(job, draft)
    )


def _may_tell(job: Job, draft: Draft) -> bool:
    """Return whether the next segment's tokens are final: vLLM misses a stop string that began in the one before."""
    return not (job.request.params.stop.strings and draft.segments)


def _tell(job: Job, index: int, tokens: list[int], logprobs: list[float], version: str) -> None:
    if job.tell is not None and tokens:
        job.drafts[index].told += len(tokens)
        job.tell(TokensSampled(job.request_id, index, tokens, logprobs, version))


def _tell_rest(job: Job, index: int, sequence: SampledSequence) -> None:
    """Give out the tokens of a finished sample that were not given out before."""
    for span in sequence.versions:
        start = max(span.start, job.drafts[index].told)
        _tell(job, index, sequence.tokens[start : span.end], sequence.logprobs[start : span.end], span.version)


def _keep_told(job: Job, index: int, chunks: list[dict[str, Any]], published: PublishedWeights) -> None:
    """Make a segment of the tokens that have come before a stream broke off, perhaps behind its last token."""
    job.drafts[index].ended = any(
        choice["finish_reason"] in ("stop", "length") for chunk in chunks for choice in chunk["choices"]
    )
    last = {"index": 0, "token_ids": [], "logprobs": None, "finish_reason": "abort", "weight_versions": None}
    reply = joined_stream([*chunks, {"choices": [] if job.drafts[index].ended else [last], "usage": {}}])
    (segment,) = sequences_of(
        reply, 1, job.request.topk_sample_logprobs, None, published.ref.label, may_be_aborted=True
    )
    _append(job, index, segment, reply)


async def _prepare(publisher: Publisher, instance: Instance, newest: NewestWeights, replaced: asyncio.Event) -> None:
    """Wait for newer weights, then load and compare them. What is wrong with them is told to those who ask for them."""
    await replaced.wait()
    with suppress(TinsmithError):
        await publisher.prepare(instance, newest.published)


async def _until(
    replacement: Coroutine[Any, Any, None],
    instance: Instance,
    generating: Callable[[str], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any] | None:
    """Return the reply to a request, aborted when the `replacement` is ready; None if it was not sent until then."""
    name = uuid.uuid4().hex
    request = asyncio.create_task(generating(name))
    ready = asyncio.create_task(replacement)
    try:
        await asyncio.wait((request, ready), return_when=asyncio.FIRST_COMPLETED)
        while not request.done():
            if name not in instance.running:
                return None
            await instance.connection.post("/abort_requests", {"request_ids": [REQUEST_PREFIX + name]})
            await asyncio.wait((request,), timeout=_AGAIN_S)
        return request.result()
    finally:
        request.cancel()
        ready.cancel()
        await asyncio.wait((request,))  # a stream that is broken off keeps what it has given out


def joined(job: Job, draft: Draft) -> SampledSequence:
    """Join the segments of a sample."""
    tokens = list(draft.tokens)
    logprobs = [logprob for segment in draft.segments for logprob in segment.logprobs]
    tops = [segment.topk for segment in draft.segments if segment.topk is not None]
    top = (
        TopLogprobs(np.concatenate([t.token_ids for t in tops]), np.concatenate([t.logprobs for t in tops]))
        if tops
        else None
    )
    reason, end = draft.segments[-1].stop_reason, len(tokens)
    if len(draft.segments) > 1 and (stopped := _stop_across(job, tokens, draft.told)) is not None:
        reason, end = "stop", stopped
        top = top and TopLogprobs(top.token_ids[:end], top.logprobs[:end])
    return SampledSequence(tokens[:end], logprobs[:end], reason, top, _spans(draft.segments, end))


def _stop_across(job: Job, tokens: list[int], told: int) -> int | None:
    """Find the end of a stop string across segments, where vLLM could not see it, behind the `told` tokens."""
    stop = job.request.params.stop
    if not stop.strings:
        return None
    rule = stop_rule(stop, job.base.eos_token_ids(), job.base.tokenizer)
    return next((position + 1 for position, token in enumerate(tokens) if rule.stops(token) and position >= told), None)


def _spans(segments: list[SampledSequence], end: int) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    start = 0
    for version, same in groupby(segments, lambda segment: segment.versions[0].version):
        stop = min(end, start + sum(len(segment.tokens) for segment in same))
        if start < stop:
            spans.append(VersionSpan(version, start, stop))
        start = stop
    return tuple(spans)
