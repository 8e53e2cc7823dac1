"""Tinker's sampling parameters as vLLM's. Each is mapped, or refused with the reason: vLLM ignores parameters that it does not know."""

import hashlib
from collections.abc import Iterable
from typing import Any

from tinsmith.errors import UserError
from tinsmith.wire.sample import SampleRequest

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises a smaller one to this."""
_ONE_REPLY = 2
"""One reply with all samples of a request, when the last has ended (`RequestOutputKind.FINAL_ONLY`). VLLM 0.32 sets this itself. Without it
0.26 answers with the last partial output, which lacks samples that ended earlier."""


def truncates(request: SampleRequest) -> bool:
    """Whether tokens are drawn from a part of the vocabulary: vLLM's log-probabilities are over that part then."""
    return request.params.temperature > 0 and (request.params.top_k > 0 or request.params.top_p < 1)


def longest_answer(request: SampleRequest, prompt: int, max_context: int, name: str) -> int:
    """As `SampleRequest.most_tokens`, less a token where vLLM has to score the answer again."""
    longest = request.most_tokens(prompt, max_context, name)
    if truncates(request) and prompt + longest == max_context:
        if request.params.max_tokens is None and longest > 1:
            return longest - 1
        raise UserError(
            f"with top_k or top_p, prompt length plus max_tokens must leave one token of the context window of {max_context}: "
            f"the answer is scored in a request of its own; ask for max_tokens={longest - 1}"
        )
    return longest


def check_parameters(request: SampleRequest) -> None:
    """Raise UserError for parameters that vLLM does not support, or would treat differently."""
    params = request.params
    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise UserError(f"temperature is {params.temperature}; vLLM accepts 0, and {LOWEST_TEMPERATURE} and above")
    if truncates(request) and params.temperature != 1:
        raise UserError(
            f"top_k={params.top_k}, top_p={params.top_p} at temperature {params.temperature}: vLLM gives no log-probabilities over the "
            "whole vocabulary for this; use temperature 1, or neither top_k nor top_p"
        )


def sampling_params(
    request: SampleRequest, max_tokens: int, eos: Iterable[int], vocab_size: int, first: int, count: int, done: int = 0
) -> dict[str, Any]:
    """VLLM's parameters for the samples [first, first + count) of a request, of whose answers `done` tokens are known already.

    The request's very first sample also brings the answers about the prompt.
    """
    params, stop = request.params, request.params.stop
    greedy = params.temperature == 0
    body: dict[str, Any] = {
        "n": count,
        "temperature": params.temperature,
        "top_p": 1.0 if greedy else params.top_p,
        "top_k": 0 if greedy or params.top_k < 0 else params.top_k,
        "max_tokens": max_tokens,
        "ignore_eos": True,  # end-of-sequence tokens are among `stop_token_ids`, if the request wants to stop at them
        "stop_token_ids": sorted({*stop.token_ids, *(eos if stop.eos else ())}),
        "stop": list(stop.strings),
        "detokenize": bool(stop.strings),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": likeliest(request.topk_sample_logprobs, vocab_size),
        "output_kind": _ONE_REPLY,
    }
    if params.seed is not None:
        body["seed"] = vllm_seed(params.seed, done) + first
    if first == done == 0 and (request.questions.logprobs or request.questions.topk):
        body["prompt_logprobs"] = request.questions.topk
    return body


def scoring_params(topk: int) -> dict[str, Any]:
    """VLLM's parameters to score an answer as part of a prompt, at temperature 1 over the whole vocabulary."""
    return {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": topk}


def likeliest(k: int, vocab_size: int) -> int:
    """How many log-probabilities to ask vLLM for to get the k likeliest: it counts the sampled token among them."""
    return min(k + 1, vocab_size) if k else 0


def vllm_seed(seed: int, done: int = 0) -> int:
    """The seed of the first sample from its token `done` on; for the others vLLM adds 1, 2, and so on.

    It is hashed, because requests with neighbouring seeds would share samples, and because a sample that is continued must not draw again
    what it drew at its beginning.
    """
    text = seed.to_bytes(8, "little") + (done.to_bytes(8, "little") if done else b"")
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
