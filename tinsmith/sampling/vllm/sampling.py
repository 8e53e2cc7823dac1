"""A job on one server, from weights that stay: all its samples at once."""

from collections import deque
from dataclasses import replace
from itertools import chain
from typing import Any

from tinsmith.sampling.sampler import SampleResult
from tinsmith.sampling.vllm.answers import prompt_answers, rescored, sequences_of
from tinsmith.sampling.vllm.generate import ask, generate, introduce
from tinsmith.sampling.vllm.job import Job
from tinsmith.sampling.vllm.parameters import sampling_params, scoring_params, truncates
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.servers import Life
from tinsmith.sampling.vllm.tasks import together
from tinsmith.wire.sample import SampledSequence


async def sample(publisher: Publisher, life: Life, job: Job) -> SampleResult:
    """The job's result. Raises as `Connection.post`, and TinsmithError if the server computes something else than the trainer."""
    async with publisher.serving(life, job.version) as model:
        left = deque(range(job.request.num_samples))
        replies = dict(chain.from_iterable(await together([_some(life, job, model, left) for _ in left])))
        sequences = list(chain.from_iterable(part for _, (part, _) in sorted(replies.items())))
        if truncates(job.request):
            sequences = await together([score_again(life, job, model, (), sequence) for sequence in sequences])
    return result_of(job, sequences, replies[0][1])


async def _some(
    life: Life, job: Job, model: str | None, left: deque[int]
) -> list[tuple[int, tuple[list[SampledSequence], dict[str, Any]]]]:
    """The number of the first of the samples in one request, these samples, and vLLM's reply. Nothing, if there are none `left`.

    It takes as many as there are slots for, so others that come later may find none.
    """
    await introduce(life, job.rendered, model)
    if not left:
        return []
    async with life.slots.some(min(len(left), life.most_together)) as slots:
        taken = [left.popleft() for _ in range(min(slots, len(left)))]
        if not taken:
            return []
        params = sampling_params(job.request, job.max_tokens, job.eos, job.vocab_size, taken[0], len(taken))
        reply = await ask(life, job.rendered, params, model)
    sequences = sequences_of(reply, len(taken), job.request.topk_sample_logprobs, life.label, job.version.ref.label)
    return [(taken[0], (sequences, reply))]


async def score_again(life: Life, job: Job, model: str | None, before: tuple[int, ...], sequence: SampledSequence) -> SampledSequence:
    """A sample, or the piece of one behind the tokens `before`, with log-probabilities over the whole vocabulary."""
    topk = job.request.topk_sample_logprobs
    reply = await generate(life, job.rendered, scoring_params(topk), model, (*before, *sequence.tokens))
    return rescored(sequence, reply["prompt_logprobs"][len(job.rendered) + len(before) :], topk)


def result_of(job: Job, sequences: list[SampledSequence], reply: dict[str, Any]) -> SampleResult:
    """What the client gets. `reply` is vLLM's to the request that asked about the prompt."""
    answers = job.answers
    if job.request.questions.logprobs or job.request.questions.topk:
        asked = prompt_answers(reply["prompt_logprobs"], job.rendered, job.request.questions)
        answers = replace(answers, logprobs=asked.logprobs, topk=asked.topk)
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return SampleResult(job.request_id, sequences, answers, len(job.rendered), cached)
