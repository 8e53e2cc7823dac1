"""The client of one base model's vLLM servers: an event loop in a thread of its own, in which all samples run side by side.

A sample goes to one server. If that is lost the sample is sent to another, or to the same one once it is back with the weights it needs.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import uvloop

from tinsmith.errors import TinsmithError
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.sequence import SampleResult
from tinsmith.vllm.answers import prompt_answers, rescored, sequences_of
from tinsmith.vllm.connection import ServerFailedError, ServerLostError
from tinsmith.vllm.generate import generate
from tinsmith.vllm.parameters import sampling_params, scoring_params, truncates
from tinsmith.vllm.publisher import Publisher, Version
from tinsmith.vllm.servers import Launch, Life, Server, Servers
from tinsmith.wire.prompt_scores import PromptAnswers
from tinsmith.wire.sample import SampledSequence, SampleRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 5
"""A sample that loses so many servers is likely to be the reason."""
_TOGETHER = 64
"""Samples of one prompt in one request."""
_AWAY_FROM_HOME = 16
"""How many more sequences a server may have to do than the idlest, before prompts go elsewhere that begin like earlier ones there."""


@dataclass(frozen=True, eq=False)
class Job:
    """A sample request that vLLM can answer."""

    request_id: str
    request: SampleRequest
    rendered: RenderedInput
    version: Version
    max_tokens: int
    eos: frozenset[int]
    vocab_size: int
    keys: list[bytes]
    """Of the prompt's full blocks."""
    answers: PromptAnswers
    """What the trainer's model has answered about the prompt already."""


class VLLMClient:
    """Runs jobs. Its methods may be called from any thread."""

    def __init__(self, sources: list[Launch | str], slots: int, publisher: Publisher) -> None:
        """Each source is a server to start, or the URL of one that runs. A server gets at most `slots` requests at a time."""
        self.publisher = publisher
        self.loop = uvloop.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True).start()
        self.servers = self.run(self._open(sources, slots)).result()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the client's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def submit(self, job: Job, done: Callable[["Future[SampleResult]"], None]) -> "Future[SampleResult]":
        """Start a job; `done` is called in the client's thread."""
        future = self.run(self._sample(job))
        future.add_done_callback(done)
        return future

    async def render(self, chat: dict[str, Any]) -> dict[str, Any]:
        """What vLLM would make of a chat: token ids and features. Runs in the client's event loop."""
        _, life = await self.servers.pick([], _AWAY_FROM_HOME)
        rendered: dict[str, Any] = await life.connection.post("/v1/chat/completions/render", chat)
        return rendered

    def forget(self, uid: int) -> None:
        """Nothing refers to an adapter any more."""
        self.run(self.publisher.forget(self.servers.all, uid))

    async def _open(self, sources: list[Launch | str], slots: int) -> Servers:
        changed = asyncio.Condition()
        return Servers([Server(source, slots, changed) for source in sources], changed)

    async def _sample(self, job: Job) -> SampleResult:
        lost = ""
        for _ in range(_ATTEMPTS):
            server, life = await self.servers.pick(job.keys, _AWAY_FROM_HOME)
            server.load += job.request.num_samples
            try:
                return await self._sample_on(life, job)
            except (ServerLostError, ServerFailedError) as error:
                if isinstance(error, ServerFailedError) and await life.answers():
                    raise
                lost = str(error)
                server.doubt(life, lost)
                log.warning("sample=%s is sent again: %s", job.request_id, lost)
            finally:
                server.load -= job.request.num_samples
        raise TinsmithError(f"{_ATTEMPTS} vLLM servers in a row were lost with this sample: {lost}")

    async def _sample_on(self, life: Life, job: Job) -> SampleResult:
        async with self.publisher.serving(life, job.version) as model:
            starts = range(0, job.request.num_samples, _TOGETHER)
            replies = await _together([self._generate(life, job, model, first) for first in starts])
            sequences = list(chain.from_iterable(part for part, _ in replies))
            if truncates(job.request):
                sequences = await _together([self._rescore(life, job, model, sequence) for sequence in sequences])
        reply = replies[0][1]
        answers = job.answers
        if job.request.questions.logprobs or job.request.questions.topk:
            asked = prompt_answers(reply["prompt_logprobs"], job.rendered, job.request.questions)
            answers = replace(answers, logprobs=asked.logprobs, topk=asked.topk)
        cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return SampleResult(job.request_id, sequences, answers, len(job.rendered), cached)

    async def _generate(self, life: Life, job: Job, model: str | None, first: int) -> tuple[list[SampledSequence], dict[str, Any]]:
        count = min(_TOGETHER, job.request.num_samples - first)
        params = sampling_params(job.request, job.max_tokens, job.eos, job.vocab_size, first, count)
        reply = await generate(life, job.rendered, params, model)
        return sequences_of(reply, count, job.request.topk_sample_logprobs, life.label), reply

    async def _rescore(self, life: Life, job: Job, model: str | None, sequence: SampledSequence) -> SampledSequence:
        topk = job.request.topk_sample_logprobs
        reply = await generate(life, job.rendered, scoring_params(topk), model, tuple(sequence.tokens))
        return rescored(sequence, reply["prompt_logprobs"][len(job.rendered) :], topk)


async def _together(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. The first error ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
