"""A job on one server, from weights that stay: all its samples at once."""

from dataclasses import replace
from itertools import chain
from typing import Any

from tinsmith.sampling.sequence import SampleResult
from tinsmith.vllm.answers import prompt_answers, rescored, sequences_of
from tinsmith.vllm.generate import generate
from tinsmith.vllm.job import Job
from tinsmith.vllm.parameters import sampling_params, scoring_params, truncates
from tinsmith.vllm.publisher import Publisher
from tinsmith.vllm.servers import Life
from tinsmith.vllm.tasks import together
from tinsmith.wire.sample import SampledSequence


async def sample(publisher: Publisher, life: Life, job: Job) -> SampleResult:
    """The job's result. Raises as `Connection.post`, and TinsmithError if the server computes something else than the trainer."""
    async with publisher.serving(life, job.version) as model:
        starts = range(0, job.request.num_samples, life.most_together)
        replies = await together([_some(life, job, model, first) for first in starts])
        sequences = list(chain.from_iterable(part for part, _ in replies))
        if truncates(job.request):
            sequences = await together([score_again(life, job, model, (), sequence) for sequence in sequences])
    return result_of(job, sequences, replies[0][1])


async def _some(life: Life, job: Job, model: str | None, first: int) -> tuple[list[SampledSequence], dict[str, Any]]:
    count = min(life.most_together, job.request.num_samples - first)
    params = sampling_params(job.request, job.max_tokens, job.eos, job.vocab_size, first, count)
    reply = await generate(life, job.rendered, params, model)
    return sequences_of(reply, count, job.request.topk_sample_logprobs, life.label, job.version.name), reply


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
