"""Segments of a sample that came from several versions, put together."""

from typing import Any

import numpy as np

from tests.bases import new_ref, random_tokens, renderer
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.job import Draft, Job, joined
from tinsmith.sampling.vllm.verify import Expectation, PublishedWeights
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, SamplingParams, StopRule, VersionSpan


def job_of(base: BaseModel, *stop: str) -> Job:
    rule = StopRule(eos=True, strings=stop, token_ids=())
    return Job(
        request_id="x",
        request=SampleRequest("s", 0, 1, [], SamplingParams(50, 1.0, 1.0, -1, None, rule), PromptQuestions()),
        rendered=renderer(base).render([random_tokens(1, 4)]),
        published=PublishedWeights(None, Expectation(np.zeros(1, dtype=np.float32), 0.001), new_ref("m/1", "m")),
        max_tokens=50,
        eos=base.eos_token_ids(),
        vocab_size=base.vocab_size,
        tokenizer=base.tokenizer,
        keys=[],
        answers=PromptAnswers(),
        tell=None,
        drafts=[Draft()],
    )


def segment(version: str, tokens: list[int], reason: Any = "length") -> SampledSequence:
    top = TopLogprobs(np.array(tokens, dtype=np.int32)[:, None], -np.array(tokens, dtype=np.float32)[:, None])
    return SampledSequence(tokens, [-float(token) for token in tokens], reason, top, (VersionSpan(version, 0, len(tokens)),))


def test_pieces_of_one_version_are_one_span(text_base: BaseModel) -> None:
    draft = Draft([segment("m/1", [5, 6]), segment("m/1", [7]), segment("m/3", [8, 9], "stop")])
    whole = joined(job_of(text_base), draft)
    assert (whole.tokens, whole.logprobs, whole.stop_reason) == ([5, 6, 7, 8, 9], [-5.0, -6.0, -7.0, -8.0, -9.0], "stop")
    assert whole.versions == (VersionSpan("m/1", 0, 3), VersionSpan("m/3", 3, 5))
    assert whole.topk is not None
    assert whole.topk.token_ids.tolist() == [[5], [6], [7], [8], [9]]


def test_a_stop_string_that_two_versions_wrote_ends_the_sample(text_base: BaseModel) -> None:
    """vLLM sees only what it writes itself, so it went on behind it."""
    ids = text_base.tokenizer.encode("one two three four", add_special_tokens=False)
    cut = len(ids) // 2
    stop = text_base.tokenizer.decode(ids[: cut + 1])[-2:]
    assert stop not in text_base.tokenizer.decode(ids[:cut])
    draft = Draft([segment("m/1", ids[:cut]), segment("m/3", ids[cut:])])
    whole = joined(job_of(text_base, stop), draft)
    assert (whole.tokens, whole.stop_reason) == (ids[: cut + 1], "stop")
    assert whole.versions == (VersionSpan("m/1", 0, cut), VersionSpan("m/3", cut, cut + 1))
    assert whole.topk is not None
    assert len(whole.topk.token_ids) == len(whole.logprobs) == cut + 1
    assert joined(job_of(text_base, "never"), draft).tokens == ids
