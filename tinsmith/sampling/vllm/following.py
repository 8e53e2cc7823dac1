"""A job on one server, from weights that are replaced while it runs (`inflight`).

When there is a new version, the server that samples loads it beside the former and is compared with the trainer. Then vLLM is told to give
up the samples of the former version, which it answers with the tokens there are, and each goes on behind these as a request for the new
version. So every token comes from the version whose span it lies in and from nothing that another left in a cache, no token leaves before
its version was compared, and nothing else that the server does is disturbed. Full weights take the same way through the gate.

vLLM could load an adapter in place instead, under the name that it has. But then it reads the files again at every step, goes on with
keys and values of the former version, and computes with the new one before anybody has compared it.
"""

import asyncio
import uuid
from functools import partial
from typing import Any

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.sampling.sampler import SampleResult
from tinsmith.sampling.stopping import StopStrings
from tinsmith.sampling.vllm.answers import sequences_of
from tinsmith.sampling.vllm.generate import REQUEST_PREFIX, generate
from tinsmith.sampling.vllm.job import Draft, Job
from tinsmith.sampling.vllm.parameters import sampling_params, truncates
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.sampling import result_of, score_again
from tinsmith.sampling.vllm.servers import Life
from tinsmith.sampling.vllm.tasks import together
from tinsmith.sampling.vllm.version import Version
from tinsmith.wire.prompt_scores import TopLogprobs
from tinsmith.wire.sample import SampledSequence, VersionSpan

_AGAIN_S = 0.05
"""How long to wait before telling vLLM once more to give a sample up: it may not have begun when it was told."""


class Line:
    """The versions of one model's inflight weights, of which only the newest counts. Used in one event loop."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.renewed = asyncio.Event()
        """Set when `version` is replaced; then there is another event for the next time."""

    def renew(self, version: Version) -> None:
        """Let all samples go on with another version."""
        self.version = version
        self.renewed.set()
        self.renewed = asyncio.Event()


async def follow(publisher: Publisher, life: Life, job: Job, line: Line) -> SampleResult:
    """The job's result, whose drafts may have been begun on another server. Raises as `sample`."""
    await together([_finish(publisher, life, job, line, index) for index in range(job.request.num_samples)])
    reply = job.drafts[0].reply
    assert reply is not None, "a draft that has ended has a piece"
    return result_of(job, [joined(job, draft) for draft in job.drafts], reply)


async def _finish(publisher: Publisher, life: Life, job: Job, line: Line, index: int) -> None:
    """Go on with one sample to its end, whatever versions come meanwhile."""
    draft = job.drafts[index]
    while not draft.ended:
        version, renewed = line.version, line.renewed
        async with publisher.serving(life, version) as model:
            reply = None
            if not renewed.is_set():  # while it waited for its turn
                prepare = partial(_prepare, publisher, life, line)
                reply = await _until(life, renewed, prepare, partial(_generate, life, job, model, index))
            if reply is not None:
                (piece,) = sequences_of(reply, 1, job.request.topk_sample_logprobs, life.label, version.ref.label, may_be_cut=True)
                if truncates(job.request) and piece.tokens:
                    piece = await score_again(life, job, model, draft.tokens, piece)
        if reply is not None:  # and the version was compared
            draft.ended = reply["choices"][0]["finish_reason"] != "abort"
            if piece.tokens:
                draft.reply = draft.reply or reply
                draft.pieces.append(piece)


async def _generate(life: Life, job: Job, model: str | None, index: int, name: str) -> dict[str, Any]:
    done = job.drafts[index].tokens
    params = sampling_params(job.request, job.max_tokens - len(done), job.eos, job.vocab_size, index, 1, len(done))
    return await generate(life, job.rendered, params, model, done, name)


async def _prepare(publisher: Publisher, life: Life, line: Line) -> None:
    """Load and compare the newest version meanwhile. What is wrong with it will be said to those who ask for it."""
    try:
        await publisher.prepare(life, line.version)
    except TinsmithError:
        return


async def _until(life: Life, renewed: asyncio.Event, prepare: Any, generating: Any) -> dict[str, Any] | None:
    """The reply to a request, which is given up at the server as soon as there is a newer version that it is ready for.

    None if it has not been sent until then.
    """
    name = uuid.uuid4().hex
    request = asyncio.create_task(generating(name))
    renewal = asyncio.create_task(_after(renewed, prepare))
    try:
        await asyncio.wait((request, renewal), return_when=asyncio.FIRST_COMPLETED)
        while not request.done():
            if name not in life.begun:
                return None
            await life.connection.post("/abort_requests", {"request_ids": [REQUEST_PREFIX + name]})
            await asyncio.wait((request,), timeout=_AGAIN_S)
        reply: dict[str, Any] = request.result()
        return reply
    finally:
        request.cancel()
        renewal.cancel()


async def _after(event: asyncio.Event, work: Any) -> None:
    await event.wait()
    await work()


def joined(job: Job, draft: Draft) -> SampledSequence:
    """The pieces of a sample as one."""
    tokens = list(draft.tokens)
    logprobs = [logprob for piece in draft.pieces for logprob in piece.logprobs]
    tops = [piece.topk for piece in draft.pieces if piece.topk is not None]
    top = TopLogprobs(np.concatenate([t.token_ids for t in tops]), np.concatenate([t.logprobs for t in tops])) if tops else None
    reason, end = draft.pieces[-1].stop_reason, len(tokens)
    if len(draft.pieces) > 1 and (stopped := _stop_across(job, tokens)) is not None:
        reason, end = "stop", stopped
        top = top and TopLogprobs(top.token_ids[:end], top.logprobs[:end])
    return SampledSequence(tokens[:end], logprobs[:end], reason, top, _spans(draft.pieces, end))


def _stop_across(job: Job, tokens: list[int]) -> int | None:
    """Where a stop string is complete that vLLM could not see, because it began in one piece and ended in another."""
    stop = job.request.params.stop
    if not stop.strings:
        return None
    rule = StopStrings((*stop.token_ids, *(job.eos if stop.eos else ())), stop.strings, job.tokenizer)
    return next((position + 1 for position, token in enumerate(tokens) if rule.stops(token)), None)


def _spans(pieces: list[SampledSequence], end: int) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    start = 0
    for piece in pieces:
        stop = min(end, start + len(piece.tokens))
        name = piece.versions[0].version
        if spans and spans[-1].version == name:
            spans[-1] = VersionSpan(name, spans[-1].start, stop)
        elif start < stop:
            spans.append(VersionSpan(name, start, stop))
        start = stop
    return tuple(spans)
