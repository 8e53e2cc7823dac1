"""Tinker's sampling parameters as vLLM's."""

from typing import Any

import pytest

from tests.bases import text
from tinsmith.errors import UserError
from tinsmith.sampling.vllm.parameters import check_parameters, longest_answer, sampling_params, vllm_seed
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule


def request(questions: PromptQuestions | None = None, topk: int = 0, stop: StopRule | None = None, **params: Any) -> SampleRequest:
    given = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": None} | params
    rule = stop or StopRule(eos=True, strings=(), token_ids=())
    return SampleRequest("s", 0, 1, [text(1)], SamplingParams(**given, stop=rule), questions or PromptQuestions(), topk)


def sent(asked: SampleRequest, first: int = 0) -> dict[str, Any]:
    return sampling_params(asked, 4, {7, 9}, 100, first, 8)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (
            request(stop=StopRule(eos=True, strings=("ab",), token_ids=(3,))),
            {"stop": ["ab"], "stop_token_ids": [3, 7, 9], "ignore_eos": True, "detokenize": True},
        ),
        (
            request(stop=StopRule(eos=False, strings=(), token_ids=())),
            {"stop": [], "stop_token_ids": [], "ignore_eos": True, "detokenize": False},
        ),
        # The sampled token is asked for beside the likeliest.
        *[(request(topk=topk), {"logprobs": logprobs}) for topk, logprobs in ((0, 0), (5, 6), (100, 100))],
        # All samples are in one reply, RequestOutputKind.FINAL_ONLY: vLLM 0.26 would send what it has after each step, and answer with what
        # it sent last, without samples that had ended before.
        (request(), {"output_kind": 2}),
        (request(PromptQuestions(logprobs=True, topk=3)), {"prompt_logprobs": 3}),
        (request(PromptQuestions(logprobs=True)), {"prompt_logprobs": 0}),
        # Greedy needs no truncation.
        (request(temperature=0.0, top_k=3, top_p=0.5), {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
    ],
)
def test_tinkers_parameters_are_vllms(asked: SampleRequest, expected: dict[str, Any]) -> None:
    check_parameters(asked)
    assert {name: value for name, value in sent(asked).items() if name in expected} == expected


def test_seeds_of_neighbours_share_no_samples_and_only_the_first_answer_about_the_prompt() -> None:
    assert "seed" not in sent(request())
    assert sent(request(seed=5), first=64)["seed"] == vllm_seed(5) + 64
    assert abs(vllm_seed(5) - vllm_seed(6)) > 10**6
    assert 0 <= vllm_seed(2**64 - 1) < 2**56
    assert "prompt_logprobs" not in sent(request(PromptQuestions(logprobs=True, topk=3)), first=64)


@pytest.mark.parametrize("params", [{"temperature": 0.009}, {"temperature": 0.5, "top_k": 2}, {"temperature": 0.5, "top_p": 0.9}])
def test_what_vllm_would_do_differently_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"temperature"):
        check_parameters(request(**params))


def test_the_context_holds_prompt_and_answer() -> None:
    """An answer that is scored again leaves a token free."""
    for asked, longest in ((request(max_tokens=None), 10), (request(max_tokens=10), 10), (request(max_tokens=None, top_k=2), 9)):
        assert longest_answer(asked, 90, 100, "tiny") == longest
    for asked, words in ((request(max_tokens=11), "90 \\+ 11 > 100"), (request(max_tokens=10, top_k=2), "max_tokens=9")):
        with pytest.raises(UserError, match=words):
            longest_answer(asked, 90, 100, "tiny")
