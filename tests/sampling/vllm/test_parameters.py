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


def sent(asked: SampleRequest, first: int = 0, count: int = 1) -> dict[str, Any]:
    return sampling_params(asked, 4, {7, 9}, 100, first, count)


def test_stop_strings_and_ids_are_kept_apart() -> None:
    both = sent(request(stop=StopRule(eos=True, strings=("ab",), token_ids=(3,))))
    assert (both["stop"], both["stop_token_ids"], both["ignore_eos"], both["detokenize"]) == (["ab"], [3, 7, 9], True, True)
    none = sent(request(stop=StopRule(eos=False, strings=(), token_ids=())))
    assert (none["stop"], none["stop_token_ids"], none["ignore_eos"], none["detokenize"]) == ([], [], True, False)


def test_seeds_of_neighbours_share_no_samples() -> None:
    assert "seed" not in sent(request())
    assert sent(request(seed=5), first=64)["seed"] == vllm_seed(5) + 64
    assert abs(vllm_seed(5) - vllm_seed(6)) > 10**6
    assert 0 <= vllm_seed(2**64 - 1) < 2**56


def test_the_sampled_token_is_asked_for_beside_the_likeliest() -> None:
    assert [sent(request(topk=k))["logprobs"] for k in (0, 5, 100)] == [0, 6, 100]


def test_all_samples_of_a_request_are_in_one_reply() -> None:
    """VLLM 0.26 would send what it has after each step, and answer with what it sent last: without samples that had ended before."""
    assert sent(request(), count=8)["output_kind"] == 2  # RequestOutputKind.FINAL_ONLY


def test_only_the_first_samples_answer_about_the_prompt() -> None:
    asked = request(PromptQuestions(logprobs=True, topk=3))
    assert sent(asked)["prompt_logprobs"] == 3
    assert "prompt_logprobs" not in sent(asked, first=64)
    assert sent(request(PromptQuestions(logprobs=True)))["prompt_logprobs"] == 0


def test_greedy_needs_no_truncation() -> None:
    greedy = sent(request(temperature=0.0, top_k=3, top_p=0.5))
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, 0, 1.0)
    check_parameters(request(temperature=0.0, top_k=3, top_p=0.5))


@pytest.mark.parametrize("params", [{"temperature": 0.009}, {"temperature": 0.5, "top_k": 2}, {"temperature": 0.5, "top_p": 0.9}])
def test_what_vllm_would_do_differently_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"temperature"):
        check_parameters(request(**params))


def test_the_context_holds_prompt_and_answer() -> None:
    assert longest_answer(request(max_tokens=None), 90, 100) == 10
    assert longest_answer(request(max_tokens=10), 90, 100) == 10
    with pytest.raises(UserError, match="90 \\+ 11 > 100"):
        longest_answer(request(max_tokens=11), 90, 100)


def test_an_answer_that_is_scored_again_leaves_a_token_free() -> None:
    assert longest_answer(request(max_tokens=None, top_k=2), 90, 100) == 9
    with pytest.raises(UserError, match="max_tokens=9"):
        longest_answer(request(max_tokens=10, top_k=2), 90, 100)
