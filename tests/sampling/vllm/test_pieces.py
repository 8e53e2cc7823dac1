"""What vLLM 0.26 answers, read as what 0.32 does, and pieces of a sample that came from several versions, put together."""

from typing import Any

import numpy as np
import pytest

from tests.bases import new_ref, random_tokens, renderer
from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.sampling.vllm.canary import Expectation, ServedWeights
from tinsmith.sampling.vllm.connection import ServerFailedError
from tinsmith.sampling.vllm.job import Draft, Job
from tinsmith.sampling.vllm.pieces import joined
from tinsmith.sampling.vllm.replies import in_new_form, sequences_of
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, SamplingParams, StopRule, VersionSpan


def older_reply(**changed: Any) -> dict[str, Any]:
    """One sample of two tokens, as 0.26 answers it."""
    content = [
        {"token": f"token_id:{token}", "logprob": -1.0 * token, "top_logprobs": [{"token": f"token_id:{token}", "logprob": -1.0 * token}]}
        for token in (5, 7)
    ]
    return {"choices": [{"index": 0, "finish_reason": "length", "token_ids": [5, 7], "logprobs": {"content": content}} | changed]}


def test_an_older_reply_is_read_and_a_newer_one_stays_as_it_is() -> None:
    newer = in_new_form(older_reply())
    (sequence,) = sequences_of(newer, 1, 1, None, "m/3")
    assert (sequence.tokens, sequence.logprobs) == ([5, 7], [-5.0, -7.0])
    assert sequence.topk is not None
    assert sequence.topk.token_ids.tolist() == [[5], [7]]
    newer["choices"][0]["weight_versions"] = [{"version": "a", "start": 0, "end": 2}]
    before = repr(newer)
    assert repr(in_new_form(newer)) == before


def test_logprobs_of_other_tokens_and_requests_that_failed_are_errors() -> None:
    with pytest.raises(TinsmithError, match="other tokens than it sampled"):
        sequences_of(in_new_form(older_reply(token_ids=[5, 8])), 1, 0, None, "m/3")
    with pytest.raises(ServerFailedError):
        in_new_form(older_reply(finish_reason="error", token_ids=[], logprobs=None))


def test_a_sample_of_other_full_weights_is_an_error() -> None:
    reply = older_reply(weight_versions=[{"version": "new", "start": 0, "end": 2}])
    for entry in reply["choices"][0]["logprobs"]["content"]:
        entry["token_id"] = int(entry["token"].removeprefix("token_id:"))
    assert sequences_of(reply, 1, 0, "new", "m/3")
    for versions in ([], [{"version": "old", "start": 0, "end": 2}], [{"version": "old"}, {"version": "new"}]):
        reply["choices"][0]["weight_versions"] = versions
        with pytest.raises(TinsmithError, match="was asked for from weights 'new'; vLLM answered with"):
            sequences_of(reply, 1, 0, "new", "m/3")


def job_of(base: BaseModel, *stop: str) -> Job:
    rule = StopRule(eos=True, strings=stop, token_ids=())
    return Job(
        request_id="x",
        request=SampleRequest("s", 0, 1, [], SamplingParams(50, 1.0, 1.0, -1, None, rule), PromptQuestions()),
        rendered=renderer(base).render([random_tokens(1, 4)]),
        served=ServedWeights(None, Expectation(np.zeros(1, dtype=np.float32), 0.001), new_ref("m/1", "m")),
        max_tokens=50,
        eos=base.eos_token_ids(),
        vocab_size=base.vocab_size,
        tokenizer=base.tokenizer,
        keys=[],
        answers=PromptAnswers(),
        tell=None,
        drafts=[Draft()],
    )


def piece(version: str, tokens: list[int], reason: Any = "length") -> SampledSequence:
    top = TopLogprobs(np.array(tokens, dtype=np.int32)[:, None], -np.array(tokens, dtype=np.float32)[:, None])
    return SampledSequence(tokens, [-float(token) for token in tokens], reason, top, (VersionSpan(version, 0, len(tokens)),))


def test_pieces_of_one_version_are_one_span(text_base: BaseModel) -> None:
    draft = Draft([piece("m/1", [5, 6]), piece("m/1", [7]), piece("m/3", [8, 9], "stop")])
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
    draft = Draft([piece("m/1", ids[:cut]), piece("m/3", ids[cut:])])
    whole = joined(job_of(text_base, stop), draft)
    assert (whole.tokens, whole.stop_reason) == (ids[: cut + 1], "stop")
    assert whole.versions == (VersionSpan("m/1", 0, cut), VersionSpan("m/3", cut, cut + 1))
    assert whole.topk is not None
    assert len(whole.topk.token_ids) == len(whole.logprobs) == cut + 1
    assert joined(job_of(text_base, "never"), draft).tokens == ids
