"""vLLM's replies as the sampler's results. A reply that contradicts itself or the request is an error, never a result.

vLLM 0.26, the newest for PyTorch 2.11, answers in another form than 0.32, and does not say which weights or which adapter it computed with:
there, that the weights have arrived, and the canary, are the checks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.connection import ServerFailedError, ServerLostError
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, VersionSpan

_TOKEN_ID = "token_id:"


def in_new_form(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply of the generate endpoint in the form of vLLM 0.32, changed in place if it is one of 0.26.

    Raises ServerFailedError where 0.32 answers 500, for a picture that it has forgotten, say.
    """
    if any(choice["finish_reason"] == "error" for choice in reply["choices"]):
        raise ServerFailedError("vLLM could not compute a request; its log says why")
    reply.setdefault("model", None)
    for choice in reply["choices"]:
        if "weight_versions" not in choice:
            choice["weight_versions"] = None
            for entry in (choice["logprobs"] or {"content": []})["content"]:
                for scored in (entry, *entry["top_logprobs"]):
                    scored["token_id"] = int(scored["token"].removeprefix(_TOKEN_ID))
    return reply


def joined_stream(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The chunks of a stream with one sample, as the reply that would have come without streaming.

    The last chunk carries the usage. A stream does not name the adapter, and has no scores of the prompt. Raises ServerLostError if it
    ended before the sample did.
    """
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if not choices or choices[-1]["finish_reason"] is None:
        raise ServerLostError("vLLM ended a stream before its sample had ended")
    whole = choices[-1] | {
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "logprobs": {"content": [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]},
    }
    return {"model": None, "choices": [whole], "prompt_logprobs": None, "usage": chunks[-1]["usage"] or {}}


def sequences_of(
    reply: dict[str, Any], count: int, topk: int, label: str | None, version: str, may_be_aborted: bool = False
) -> list[SampledSequence]:
    """The samples of a reply from the weights that clients call `version`, with the `topk` likeliest tokens of each position.

    `label` is what the server calls the full weights that were asked for; None checks nothing. Raises TinsmithError for other weights, and
    ServerLostError for a sample that the server aborted, unless it `may_be_aborted`.
    """
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if len(choices) != count:
        raise TinsmithError(f"vLLM answered {len(choices)} samples where {count} were asked for")
    return [_sequence(choice, topk, label, version, may_be_aborted) for choice in choices]


def _sequence(choice: dict[str, Any], topk: int, label: str | None, version: str, may_be_aborted: bool) -> SampledSequence:
    reason, tokens = choice["finish_reason"], choice["token_ids"]
    if may_be_aborted and reason == "abort":
        reason = "length"
    if reason not in ("stop", "length"):
        raise ServerLostError(f"vLLM ended a sample with finish_reason={reason!r}")
    versions = {span["version"] for span in choice["weight_versions"] or ()}
    if label is not None and tokens and versions != {label}:
        raise TinsmithError(f"the sample was asked for from weights {label!r}; vLLM answered with {sorted(versions)}")
    content = choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != tokens:
        raise TinsmithError("vLLM's log-probabilities are about other tokens than it sampled")
    top = None
    if topk:
        top = TopLogprobs.empty(len(tokens), topk)
        for row, entry in enumerate(content):
            _fill(top, row, {other["token_id"]: other["logprob"] for other in entry["top_logprobs"]}, topk)
    spans = (VersionSpan(version, 0, len(tokens)),)
    return SampledSequence(tokens, [entry["logprob"] for entry in content], reason, top, spans)


def _fill(top: TopLogprobs, row: int, logprobs: dict[int, float], k: int) -> None:
    """Write the k likeliest tokens of a position; of equally likely ones the lowest id comes first, as with the local sampler."""
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
    top.token_ids[row, : len(best)] = [token for token, _ in best]
    top.logprobs[row, : len(best)] = [logprob for _, logprob in best]


def rescored(sequence: SampledSequence, scores: Sequence[dict[str, Any]], topk: int) -> SampledSequence:
    """A sample with new log-probabilities: `scores` are vLLM's prompt_logprobs of its positions, from a request with it in the prompt."""
    logprobs = [entry[str(token)]["logprob"] for entry, token in zip(scores, sequence.tokens, strict=True)]
    top = None
    if topk:
        top = TopLogprobs.empty(len(scores), topk)
        for row, entry in enumerate(scores):
            _fill(top, row, _by_token(entry), topk)
    return replace(sequence, logprobs=logprobs, topk=top)


def _by_token(entry: dict[str, Any]) -> dict[int, float]:
    return {int(token): score["logprob"] for token, score in entry.items()}


def prompt_answers(scores: Sequence[dict[str, Any] | None], rendered: RenderedInput, questions: PromptQuestions) -> PromptAnswers:
    """The answers about the prompt's own tokens, from vLLM's prompt_logprobs [prompt tokens], of which the first is None."""
    length = len(rendered)
    if len(scores) != length:
        raise TinsmithError(f"vLLM scored {len(scores)} positions of a prompt of {length} tokens")
    first = questions.scored_from(length)
    text = rendered.is_text
    logprobs = np.full(length, np.nan, dtype=np.float32)
    top = TopLogprobs.empty(length, questions.topk)
    for position, entry in enumerate(scores[first:], first):
        if not text[position]:
            logprobs[position] = 0.0
        elif entry is not None:
            logprobs[position] = entry[str(rendered.token_ids[position])]["logprob"]
            _fill(top, position, _by_token(entry), questions.topk)
    if first == 1 and not text[0]:
        logprobs[0] = 0.0
    return PromptAnswers(logprobs=logprobs if questions.logprobs else None, topk=top if questions.topk else None)
