"""Penalties, min_p and grammars, against the formulas in plain Python.

Invariant: A token that is drawn with penalties, min_p or a grammar follows from the row's own logits, tokens and
request: batch mates change nothing.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import DEVICE, write_family
from tinsmith.chat.grammar import Grammars, json_grammar
from tinsmith.chat.template import ChatFormat
from tinsmith.errors import UserError
from tinsmith.sampling.choose import Choice, choose
from tinsmith.sampling.shaping import Shape
from tinsmith.wire.sample import SamplingParams, Shaping

VOCABULARY = 300
PROMPT = np.array([5, 7, 7, 250], np.int32)
ANSWER = [9, 9, 9, 5, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    directory = tmp_path_factory.mktemp("qwen3")
    write_family("qwen3", directory)
    return ChatFormat(str(directory))


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def choice(
    shaping: Shaping | None, seed: int = 1, tokens: list[int] | None = None, topk: int = 0, **params: Any
) -> Choice:
    tokens = ANSWER if tokens is None else tokens
    shape = None if shaping is None else Shape(shaping, PROMPT).follow(tokens)
    return Choice(SamplingParams(**params), seed, 0, len(tokens), topk, shape)


def penalized(logits: list[float], shaping: Shaping, tokens: list[int]) -> list[float]:
    """The logits with penalties, token by token."""
    found = list(logits)
    for token in {*tokens, *(PROMPT.tolist() if shaping.repetition_penalty != 1 else ())}:
        logit = found[token]
        logit = logit / shaping.repetition_penalty if logit > 0 else logit * shaping.repetition_penalty
        logit -= shaping.frequency_penalty * tokens.count(token)
        found[token] = logit - (shaping.presence_penalty if token in tokens else 0)
    return found


def logprobs_of(logits: list[float], temperature: float) -> list[float]:
    scaled = [(logit - max(logits)) / temperature for logit in logits]
    total = math.log(sum(map(math.exp, scaled)))
    return [each - total for each in scaled]


@pytest.mark.parametrize(
    "shaping",
    [
        Shaping(presence_penalty=1.5),
        Shaping(frequency_penalty=0.7),
        Shaping(repetition_penalty=1.4),
        Shaping(presence_penalty=-2.0, frequency_penalty=-0.5, repetition_penalty=0.5),
    ],
)
def test_penalties_change_the_distribution_as_the_formula_says(shaping: Shaping) -> None:
    """The likeliest tokens are all of them."""
    logits = logits_of(3)
    expected = logprobs_of(penalized(logits[0].tolist(), shaping, ANSWER), 0.8)
    (found,) = choose(logits.clone().to(DEVICE), [choice(shaping, temperature=0.8, topk=VOCABULARY)])
    assert dict(zip(*found.top, strict=True)) == pytest.approx(dict(enumerate(expected)), abs=1e-4)
    assert found.logprob == pytest.approx(expected[found.token], abs=1e-4)
    for token in {*ANSWER}:
        assert abs(expected[token] - logprobs_of(logits[0].tolist(), 0.8)[token]) > 0.01, "the penalty changes nothing"
    (greedy,) = choose(logits.clone().to(DEVICE), [choice(shaping, temperature=0.0)])
    assert greedy.token == int(np.argmax(penalized(logits[0].tolist(), shaping, ANSWER)))


@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (3, 1.0), (-1, 0.6), (4, 0.7)])
def test_min_p_leaves_out_what_is_unlikelier_then_top_k_and_top_p_hold(top_k: int, top_p: float) -> None:
    shaping = Shaping(min_p=0.1, frequency_penalty=0.5)
    logits = logits_of(4)
    logprobs = logprobs_of(penalized(logits[0].tolist(), shaping, ANSWER), 1.6)
    ordered = sorted(range(VOCABULARY), key=lambda token: -logprobs[token])
    kept = [token for token in ordered if logprobs[token] >= max(logprobs) + math.log(0.1)]
    assert len(kept) > 4
    kept = kept[:top_k] if top_k > 0 else kept
    total, share, allowed = sum(math.exp(logprobs[token]) for token in kept), 0.0, []
    for token in kept:
        if share < top_p * total or top_p == 1:
            allowed.append(token)
        share += math.exp(logprobs[token])
    drawn = 4000
    how = [choice(shaping, seed, temperature=1.6, top_k=top_k, top_p=top_p) for seed in range(drawn)]
    found = choose(logits.expand(drawn, -1).contiguous().to(DEVICE), how)
    counts = np.bincount([each.token for each in found], minlength=VOCABULARY) / drawn
    assert set(np.flatnonzero(counts)) == set(allowed)
    weights = np.exp([logprobs[token] for token in allowed])
    np.testing.assert_allclose(counts[allowed], weights / weights.sum(), atol=0.035)
    assert all(each.logprob == pytest.approx(logprobs[each.token], abs=1e-4) for each in found)


def test_a_row_is_shaped_whatever_its_batch_mates_ask() -> None:
    """Rows without a shape are drawn as without those that have one."""
    shapings = [None, Shaping(presence_penalty=2.0), Shaping(min_p=0.3), None, Shaping(repetition_penalty=1.5)]
    logits = logits_of(5, len(shapings)).to(DEVICE)
    for seed in range(20):
        how = [choice(each, seed, temperature=1.3, topk=3) for each in shapings]
        together = choose(logits.clone(), how)
        alone = [choose(logits[row : row + 1].clone(), [how[row]])[0] for row in range(len(how))]
        assert together == alone


def test_tokens_are_counted_once_however_often_they_are_looked_at() -> None:
    shape = Shape(Shaping(frequency_penalty=1.0, repetition_penalty=2.0), PROMPT)
    for end in range(len(ANSWER) + 1):
        tokens, counts = shape.follow(ANSWER[:end]).counted()
        assert dict(zip(tokens.tolist(), counts.tolist(), strict=True)) == {
            token: ANSWER[:end].count(token) for token in {*PROMPT.tolist(), *ANSWER[:end]}
        }


def test_a_grammar_is_kept_to_at_any_temperature(model: ChatFormat) -> None:
    """The tokens that it allows may be so unlikely that their log-probability is no number of 32 bits."""
    begun = Grammars(model.tokenizer, 2050, model.stop_ids).begin(json_grammar({"type": "object"}))
    allowed = np.unpackbits(begun.mask().view(np.uint8), bitorder="little")
    logits = torch.randn(1, 2050, generator=torch.Generator().manual_seed(6)) * 10
    for temperature in (0.0, 1e-40, 1e-38, 1e-3, 1.0):
        shape = Shape(Shaping(grammar=""), PROMPT, begun.copy()).follow([])
        how = Choice(SamplingParams(temperature=temperature), 1, 0, 0, 0, shape)
        (found,) = choose(logits.clone().to(DEVICE), [how])
        assert allowed[found.token], temperature
        if temperature < 0.01:
            assert found.token == int(logits[0].masked_fill(torch.tensor(allowed[:2050] == 0), -torch.inf).argmax())


def test_a_grammar_that_fails_fails_where_its_sequence_is_alone(model: ChatFormat) -> None:
    """It fails as the tokens are counted, not where a batch is drawn."""
    grammar = json_grammar({"type": "object"})
    shape = Shape(Shaping(grammar=grammar), PROMPT, Grammars(model.tokenizer, 2050, model.stop_ids).begin(grammar))
    with pytest.raises(UserError, match="cannot be held"):
        shape.follow(model.tokenizer.encode("no", add_special_tokens=False).ids)
