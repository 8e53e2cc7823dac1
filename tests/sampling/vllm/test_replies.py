"""What vLLM 0.26 answers, read as what 0.32 does."""

from typing import Any

import pytest

from tinsmith.sampling.vllm.connection import ServerFailedError
from tinsmith.sampling.vllm.replies import in_new_form, sequences_of


def reply() -> dict[str, Any]:
    """One sample of two tokens, as 0.26 answers it."""
    content = [
        {"token": f"token_id:{token}", "logprob": -1.0 * token, "top_logprobs": [{"token": f"token_id:{token}", "logprob": -1.0 * token}]}
        for token in (5, 7)
    ]
    return {"choices": [{"index": 0, "finish_reason": "length", "token_ids": [5, 7], "logprobs": {"content": content}}]}


def test_an_older_reply_is_read() -> None:
    (sequence,) = sequences_of(in_new_form(reply()), 1, 1, None, "m/3")
    assert sequence.tokens == [5, 7]
    assert sequence.logprobs == [-5.0, -7.0]
    assert sequence.topk is not None
    assert sequence.topk.token_ids.tolist() == [[5], [7]]


def test_a_newer_reply_stays_as_it_is() -> None:
    newer = in_new_form(reply())
    newer["choices"][0]["weight_versions"] = [{"version": "a", "start": 0, "end": 2}]
    before = repr(newer)
    assert repr(in_new_form(newer)) == before


def test_logprobs_of_other_tokens_are_noticed() -> None:
    older = reply()
    older["choices"][0]["token_ids"] = [5, 8]
    with pytest.raises(Exception, match="other tokens than it sampled"):
        sequences_of(in_new_form(older), 1, 0, None, "m/3")


def test_a_request_that_failed_is_an_error() -> None:
    failed = reply()
    failed["choices"][0] |= {"finish_reason": "error", "token_ids": [], "logprobs": None}
    with pytest.raises(ServerFailedError):
        in_new_form(failed)
