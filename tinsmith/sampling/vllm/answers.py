"""vLLM's replies as the sampler's results. What does not fit together is an error, never a result."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tinsmith.errors import TinsmithError
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.connection import ServerLostError
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, VersionSpan


def sequences_of(
    reply: dict[str, Any], count: int, topk: int, label: str | None, version: str, may_be_cut: bool = False
) -> list[SampledSequence]:
    """The samples of a reply from the weights that clients call `version`, with the `topk` likeliest tokens of each position.

    `label` is what the server calls the weights that were asked for; None checks nothing. Raises TinsmithError for other weights,
    ServerLostError for a sample that the server gave up, unless it `may_be_cut`.
    """
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if len(choices) != count:
        raise TinsmithError(f"vLLM answered {len(choices)} samples where {count} were asked for")
    return [_sequence(choice, topk, label, version, may_be_cut) for choice in choices]


def _sequence(choice: dict[str, Any], topk: int, label: str | None, version: str, may_be_cut: bool) -> SampledSequence:
    reason, tokens = choice["finish_reason"], choice["token_ids"]
    if may_be_cut and reason == "abort":
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
    """The k likeliest of a position; among equals the first id, as it is with the local sampler."""
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
    top.token_ids[row, : len(best)] = [token for token, _ in best]
    top.logprobs[row, : len(best)] = [logprob for _, logprob in best]


def rescored(sequence: SampledSequence, scores: Sequence[dict[str, Any]], topk: int) -> SampledSequence:
    """A sample with the log-probabilities that it has as the end of a prompt: `scores` are vLLM's prompt_logprobs of its positions."""
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
    """What was asked about the prompt's own tokens, from vLLM's prompt_logprobs [prompt tokens], whose first is None."""
    length = len(rendered)
    if len(scores) != length:
        raise TinsmithError(f"vLLM scored {len(scores)} positions of a prompt of {length} tokens")
    first = length - questions.last_n if questions.last_n is not None else 1
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
