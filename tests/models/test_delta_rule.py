"""Convolution and gated delta rule of packed sequences, against the formulas written out token by token, values and gradients."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import silu

from tests.bases import DEVICE
from tinsmith.models import delta_chunks
from tinsmith.models.delta_rule import Lengths, convolve, convolve_anew, gated_delta_rule, gated_delta_rule_anew

KEY_HEADS, GROUPS, KEY_DIM, VALUE_DIM = 2, 2, 5, 3
CHANNELS, TAPS = 4, 4
HARD = [1, 2, 3, 4, 63, 64, 65, 130]

Numbers = list[Any]
"""Tensors, the last of them perhaps None."""


def recurrence(
    lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Tensor | None
) -> list[Tensor]:
    """The outputs of the gated delta rule and the last states, one token after the other."""
    groups = value.shape[1] // key.shape[1]
    query, key = ((x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt()).repeat_interleave(groups, 1) for x in (query, key))
    outs, after = [], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2]) if before is None else before[index]
        for t in range(start, end):
            state = state * decay[t].exp()[:, None, None]
            update = beta[t][:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + torch.einsum("hk,hv->hkv", key[t], update)
            outs.append(torch.einsum("hkv,hk->hv", state, query[t]) / key.shape[2] ** 0.5)
        after.append(state)
    return [torch.stack(outs), torch.stack(after)]


def taps_of(lengths: Sequence[int], x: Tensor, weight: Tensor, before: Tensor | None) -> list[Tensor]:
    """The outputs of the convolution and the last inputs, one token after the other."""
    outs, after = [], []
    for index, (start, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(lengths)])):
        seen = list(x.new_zeros(TAPS - 1, CHANNELS) if before is None else before[index])
        for t in range(start, end):
            seen.append(x[t])
            outs.append(silu(sum((seen[tap - TAPS] * weight[:, tap] for tap in range(TAPS)), x.new_zeros(CHANNELS))))
        after.append(torch.stack(seen[1 - TAPS :]))
    return [torch.stack(outs), torch.stack(after)]


def rule(lengths: Sequence[int], inputs: Numbers) -> tuple[Tensor, Tensor]:
    """Ours."""
    query, key, value, decay, beta, before = inputs
    return gated_delta_rule(query, key, value, decay, beta, Lengths(tuple(lengths)), before)


def rule_anew(lengths: Sequence[int], inputs: Numbers) -> Tensor:
    """Ours, for sequences that begin here and are not continued."""
    query, key, value, decay, beta, *_ = inputs
    return gated_delta_rule_anew(query, key, value, decay, beta, Lengths(tuple(lengths)))


def rule_inputs(lengths: Sequence[int], states: bool, key_dim: int = KEY_DIM, dtype: torch.dtype = torch.float64) -> Numbers:
    """Random query, key, value, decay, beta and states."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens, heads = sum(lengths), KEY_HEADS * GROUPS

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    inputs = [drawn(tokens, KEY_HEADS, key_dim), drawn(tokens, KEY_HEADS, key_dim), drawn(tokens, heads, VALUE_DIM)]
    inputs += [-drawn(tokens, heads).abs(), drawn(tokens, heads).sigmoid()]
    return [*_leaves(inputs), *_leaves([drawn(len(lengths), heads, key_dim, VALUE_DIM)] if states else []), *([] if states else [None])]


def convolution_inputs(lengths: Sequence[int], states: bool) -> Numbers:
    """Random inputs, weights and earlier inputs."""
    generator = torch.Generator().manual_seed(sum(lengths))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = _leaves([drawn(sum(lengths), CHANNELS), drawn(CHANNELS, TAPS)])
    return [*found, *(_leaves([drawn(len(lengths), TAPS - 1, CHANNELS)]) if states else [None])]


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.to(DEVICE).requires_grad_() for x in tensors]


def values_and_gradients(outs: Sequence[Tensor], inputs: Numbers) -> list[Tensor]:
    """The outputs, and the gradients of a fixed random sum of them."""
    generator = torch.Generator().manual_seed(0)
    total = sum(((out * torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)).sum() for out in outs), torch.zeros(()))
    return [*outs, *torch.autograd.grad(total, [x for x in inputs if x is not None])]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-10) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


LENGTHS = st.lists(st.integers(1, 24), min_size=1, max_size=5)


@settings(deadline=None, max_examples=8)
@given(LENGTHS, st.booleans())
@example([1, 1, 1], True)
@example([1, 1, 1], False)
def test_the_rule_equals_the_recurrence(lengths: list[int], states: bool) -> None:
    inputs = rule_inputs(lengths, states)
    got = rule(lengths, inputs)
    expected = recurrence(lengths, *inputs)
    assert_same(values_and_gradients(got, inputs), values_and_gradients(expected, inputs))


@settings(deadline=None, max_examples=8)
@given(LENGTHS, st.booleans())
@example([1, 1, 1], True)
@example([1, 1, 1], False)
def test_the_convolution_equals_its_formula(lengths: list[int], states: bool) -> None:
    inputs = convolution_inputs(lengths, states)
    got = convolve(inputs[0], inputs[1], Lengths(tuple(lengths)), inputs[2])
    expected = taps_of(lengths, *inputs)
    assert_same(values_and_gradients(got, inputs), values_and_gradients(expected, inputs))


@pytest.mark.parametrize("key_dim", [5, 24, 64])  # chunks of 16, 32 and 64 tokens
@pytest.mark.parametrize("states", [False, True])
def test_chunks_of_every_size(key_dim: int, states: bool) -> None:
    inputs = rule_inputs(HARD, states, key_dim)
    got = rule(HARD, inputs)
    assert_same(values_and_gradients(got, inputs), values_and_gradients(recurrence(HARD, *inputs), inputs))


def test_heads_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = rule_inputs([33, 5], states=True)
    whole = values_and_gradients(rule([33, 5], inputs), inputs)
    monkeypatch.setattr(delta_chunks, "SLICE_NUMBERS", 1)
    assert_same(values_and_gradients(rule([33, 5], inputs), inputs), whole)


def test_rows_that_keep_no_state() -> None:
    lengths = Lengths(tuple(HARD))
    inputs = rule_inputs(HARD, states=False)
    kept = rule(HARD, inputs)[0]
    assert_same(values_and_gradients([rule_anew(HARD, inputs)], inputs), values_and_gradients([kept], inputs))
    row = convolution_inputs(HARD, states=False)
    kept = convolve(row[0], row[1], lengths, None)[0]
    assert_same(values_and_gradients([convolve_anew(row[0], row[1], lengths)], row), values_and_gradients([kept], row))


def test_a_sequence_in_windows_equals_the_whole() -> None:
    """The states continue a sequence: in pieces, then token by token."""
    inputs, row = rule_inputs([70], states=False), convolution_inputs([70], states=False)
    whole, convolved = recurrence([70], *inputs)[0], taps_of([70], *row)[0]
    outs, rows, start = [], [], 0
    state: Tensor | None = None
    earlier: Tensor | None = None
    for length in (2, 1, 40, 1, 1, 25):
        own = slice(start, start + length)
        out, state = rule([length], [*(x[own] for x in inputs[:5]), state])
        outs.append(out)
        out, earlier = convolve(row[0][own], row[1], Lengths((length,)), earlier)
        rows.append(out)
        start += length
    assert_same([torch.cat(outs), torch.cat(rows)], [whole, convolved])


def test_repeated_keys_in_float32() -> None:
    """Tokens whose keys are alike and whose states do not decay: what a series of powers would lose to cancellation."""
    lengths = [130]
    inputs = rule_inputs(lengths, states=False, key_dim=64, dtype=torch.float32)
    key = inputs[1][:1].detach().expand_as(inputs[1]).clone().requires_grad_()
    inputs[1], inputs[3] = key, torch.full_like(inputs[3], -1e-4, requires_grad=True)
    inputs[4] = torch.full_like(inputs[4], 0.99, requires_grad=True)
    got = values_and_gradients([rule_anew(lengths, inputs)], inputs)
    exact: Numbers = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    expected = values_and_gradients([recurrence(lengths, *exact)[0]], exact)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * max(1.0, theirs.abs().max().item()))


def spoil(row: Tensor, spoiled: slice) -> Tensor:
    """The row with NaN in place of some tokens."""
    row = row.detach().clone()
    row[spoiled] = torch.nan
    return row.requires_grad_()


Operation = Callable[[list[Tensor], Lengths], Tensor]
OPERATIONS: dict[str, tuple[Callable[[], list[Tensor]], Operation]] = {
    "convolution": (
        lambda: [convolution_inputs(HARD, False)[0]],
        lambda x, lengths: convolve_anew(x[0], torch.ones(CHANNELS, TAPS).to(x[0]), lengths),
    ),
    "rule": (lambda: rule_inputs(HARD, False)[:5], lambda x, lengths: rule_anew(lengths.lengths, x)),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("neighbour", range(len(HARD)))
def test_no_nan_crosses_forward_or_backward(operation: str, neighbour: int) -> None:
    """A neighbour whose inputs, or whose gradients, are NaN leaves the bits of all others as they are."""
    make, compute = OPERATIONS[operation]
    lengths, starts = Lengths(tuple(HARD)), [0, *itertools.accumulate(HARD)]
    theirs = slice(starts[neighbour], starts[neighbour + 1])
    clean = make()
    others = torch.ones(sum(HARD), dtype=torch.bool, device=clean[0].device)
    others[theirs] = False
    out = compute(clean, lengths)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype).to(out.device)
    expected = [out, *torch.autograd.grad(out, clean, weights)]
    spoiled = [spoil(x, theirs) for x in clean]
    out = compute(spoiled, lengths)
    got = [out, *torch.autograd.grad(out, spoiled, spoil(weights, theirs).detach())]
    assert got[0][theirs].isnan().any()
    for ours, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(ours[others], wanted[others], rtol=0, atol=0)
