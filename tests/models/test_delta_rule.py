"""Convolution and gated delta rule of packed sequences, against the formulas written out token by token, values and gradients.

The Triton kernels, which an interpreter runs on a CPU, are compared with our own code in float64.

Invariant: Hybrid models: convolution and delta rule equal their formulas, a packed row equals each sequence alone and transformers, and
no NaN crosses.
Also: `tests/training/test_against_peft.py`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from tests.bases import DEVICE
from tests.extent import amount
from tinsmith.models import delta_chunks, delta_rule_kernels
from tinsmith.models.convolution_kernels import convolution
from tinsmith.models.delta_chunks import chunks_of, delta_rule_in_chunks
from tinsmith.models.delta_rule import Lengths, convolve, convolve_anew, gated_delta_rule, gated_delta_rule_anew

KEY_HEADS, GROUPS, KEY_DIM, VALUE_DIM = 2, 2, 5, 3
CHANNELS, TAPS = 4, 4
HARD = [1, 2, 3, 4, 63, 64, 65, amount(70, 130)]
"""Lengths around those of chunks. The last has two or three of the longest."""

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


def drawing(seed: int, dtype: torch.dtype = torch.float32) -> Callable[..., Tensor]:
    """Makes random tensors of the shapes that it is given."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype).to(DEVICE)


def leaves(*tensors: Tensor | None) -> Numbers:
    """Of which gradients are asked."""
    return [None if x is None else x.detach().requires_grad_() for x in tensors]


def rule_inputs(lengths: Sequence[int], states: bool, key_dim: int = KEY_DIM, dtype: torch.dtype = torch.float64) -> Numbers:
    """Random query, key, value, decay, beta and states."""
    drawn, tokens, heads = drawing(sum(lengths), dtype), sum(lengths), KEY_HEADS * GROUPS
    inputs = [drawn(tokens, KEY_HEADS, key_dim), drawn(tokens, KEY_HEADS, key_dim), drawn(tokens, heads, VALUE_DIM)]
    inputs += [-drawn(tokens, heads).abs(), drawn(tokens, heads).sigmoid()]
    return leaves(*inputs, drawn(len(lengths), heads, key_dim, VALUE_DIM) if states else None)


def convolution_inputs(lengths: Sequence[int], states: bool) -> Numbers:
    """Random inputs, weights and earlier inputs."""
    drawn = drawing(sum(lengths), torch.float64)
    return leaves(drawn(sum(lengths), CHANNELS), drawn(CHANNELS, TAPS), drawn(len(lengths), TAPS - 1, CHANNELS) if states else None)


def values_and_gradients(outs: Sequence[Tensor], inputs: Numbers) -> list[Tensor]:
    """The outputs, and the gradients of a fixed random sum of them, in their own precision."""
    drawn = drawing(0)
    weights = [drawn(*out.shape).bfloat16().to(out) for out in outs]
    return [x.detach() for x in (*outs, *torch.autograd.grad(outs, [x for x in inputs if x is not None], weights))]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-10) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


EXAMPLES = given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=5), states=st.booleans())


@pytest.mark.parametrize("key_dim", [5, 24, 64])  # chunks of 16, 32 and 64 tokens
@settings(deadline=None, max_examples=amount(1, 4))
@EXAMPLES
@example([1, 1, 1], True)
@example([1, 1, 1], False)
@example(HARD, True)
@example(HARD, False)
def test_the_rule_equals_the_recurrence(key_dim: int, lengths: list[int], states: bool) -> None:
    """Also where no state is kept."""
    inputs = rule_inputs(lengths, states, key_dim)
    expected = values_and_gradients(recurrence(lengths, *inputs), inputs)
    assert_same(values_and_gradients(rule(lengths, inputs), inputs), expected)
    if not states:
        expected = values_and_gradients(recurrence(lengths, *inputs)[:1], inputs)
        assert_same(values_and_gradients([rule_anew(lengths, inputs)], inputs), expected)


@settings(deadline=None, max_examples=8)
@EXAMPLES
@example([1, 1, 1], True)
@example([1, 1, 1], False)
@example(HARD, False)
def test_the_convolution_equals_its_formula(lengths: list[int], states: bool) -> None:
    x, weight, before = inputs = convolution_inputs(lengths, states)
    expected = values_and_gradients(taps_of(lengths, *inputs), inputs)
    assert_same(values_and_gradients(convolve(x, weight, Lengths(tuple(lengths)), before), inputs), expected)
    if not states:
        expected = values_and_gradients(taps_of(lengths, *inputs)[:1], inputs)
        assert_same(values_and_gradients([convolve_anew(x, weight, Lengths(tuple(lengths)))], inputs), expected)


def test_repeated_keys_in_float32() -> None:
    """Tokens whose keys are alike and whose states do not decay: what a series of powers would lose to cancellation."""
    lengths = [130]
    inputs = rule_inputs(lengths, states=False, key_dim=64, dtype=torch.float32)
    key = inputs[1][:1].detach().expand_as(inputs[1]).clone().requires_grad_()
    inputs[1], inputs[3] = key, torch.full_like(inputs[3], -1e-4, requires_grad=True)
    inputs[4] = torch.full_like(inputs[4], 0.99, requires_grad=True)
    got = values_and_gradients([rule_anew(lengths, inputs)], inputs)
    exact = leaves(*(None if x is None else x.double() for x in inputs))
    expected = values_and_gradients([recurrence(lengths, *exact)[0]], exact)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4 * max(1.0, theirs.abs().max().item()))


WIDTH = 16
WIDE = 130
"""Channels of the kernel of the convolution."""
ROUNDED = 2**-7
"""How far bfloat16 rounds at most, as a share: the interpreter cuts numbers off."""
EXACT = 2**-13
"""How far float32 results of kernels may lie from those of float64: numbers are kept in two bfloat16."""


def for_rule_kernels(lengths: Sequence[int], key_heads: int, groups: int, states: bool) -> list[Tensor]:
    """Query, key, value, decay, beta and perhaps states, in the precisions that kernels take."""
    drawn, tokens, heads = drawing(0), sum(lengths), key_heads * groups
    made = [drawn(tokens, count, WIDTH).bfloat16() for count in (key_heads, key_heads, heads)]
    made += [logsigmoid(drawn(tokens, heads) + 2), drawn(tokens, heads).sigmoid().bfloat16()]
    return [*made, *([drawn(len(lengths), heads, WIDTH, WIDTH)] if states else [])]


def for_convolution_kernel(lengths: Sequence[int]) -> list[Tensor]:
    """x in rows that are wider than it, weight, and what came before."""
    drawn = drawing(sum(lengths))
    x, weight, before = (drawn(*shape).bfloat16() for shape in ((sum(lengths), WIDE + 6), (WIDE, TAPS), (len(lengths), TAPS - 1, WIDE)))
    return [x[:, 3 : WIDE + 3], weight, before]


def assert_rounded(got: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    for ours, theirs in zip(got, exact, strict=True):
        assert (ours.double() - theirs).norm() <= (ROUNDED if ours.dtype == torch.bfloat16 else EXACT) * theirs.norm()


def rule_of_kernels(lengths: tuple[int, ...], given: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, the last states if there are some before, and gradients."""
    query, key, value, decay, beta, *before = inputs = leaves(*given)
    found = delta_rule_kernels.delta_rule(query, key, value, decay, beta, lengths, before[0] if before else None, bool(before))
    return values_and_gradients(found[: 1 + len(before)], inputs)


@pytest.mark.parametrize(("lengths", "groups", "states"), [((1, 65), 2, True), ((130,), 1, False)])
def test_the_kernels_of_the_rule(lengths: tuple[int, ...], groups: int, states: bool) -> None:
    """Chunks of one token and of 64."""
    given = for_rule_kernels(lengths, 1, groups, states)
    query, key, value, decay, beta, *before = exact = leaves(*(x.double() for x in given))
    chunks = chunks_of(lengths, WIDTH, value.device)
    found = delta_rule_in_chunks(query, key, value, decay, beta, chunks, before[0] if before else None, states)
    assert_rounded(rule_of_kernels(lengths, given), values_and_gradients(found[: 1 + states], exact))


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("lengths", [(1, 2, 3, 40), (66,)])
def test_the_kernel_of_the_convolution(lengths: tuple[int, ...], continues: bool) -> None:
    x, weight, earlier = for_convolution_kernel(lengths)
    before = earlier if continues else None
    ours, exact = (leaves(x.to(dtype), weight.to(dtype)) for dtype in (torch.bfloat16, torch.float64))
    out = convolution(ours[0], ours[1], lengths, before)
    wanted, _ = convolve(exact[0], exact[1], Lengths(lengths), None if before is None else before.double())
    assert out.dtype == torch.bfloat16
    assert_rounded(values_and_gradients([out], ours), values_and_gradients([wanted], exact))


def test_heads_that_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, for the memory: kernels give the same bits."""
    inputs, given = rule_inputs([33, 5], states=True), for_rule_kernels((20,), 2, 1, states=True)
    whole, of_kernels = values_and_gradients(rule([33, 5], inputs), inputs), rule_of_kernels((20,), given)
    monkeypatch.setattr(delta_chunks, "SLICE_NUMBERS", 1)
    monkeypatch.setattr(delta_rule_kernels, "STATE_BYTES", 1)
    assert_same(values_and_gradients(rule([33, 5], inputs), inputs), whole)
    assert_same(rule_of_kernels((20,), given), of_kernels, bound=0)


def test_what_came_before_is_that_of_the_same_sequence() -> None:
    """A row that is cut anywhere, and goes on with what came before, has the bits of the whole row."""
    x, weight, _ = for_convolution_kernel((20,))
    whole = convolution(x, weight, (20,), None)
    for cut in (1, 2, 3, 11):
        _, after = convolve(x[:cut], weight, Lengths((cut,)), None)
        assert torch.equal(convolution(x[cut:], weight, (20 - cut,), after), whole[cut:])


FEW = [3, 66, 2]
Operation = tuple[list[int], Callable[[], list[Tensor]], Callable[[list[Tensor], tuple[int, ...]], Tensor]]
OPERATIONS: dict[str, Operation] = {
    "convolution": (
        HARD,
        lambda: [convolution_inputs(HARD, False)[0]],
        lambda x, lengths: convolve_anew(x[0], torch.ones(CHANNELS, TAPS).to(x[0]), Lengths(lengths)),
    ),
    "rule": (HARD, lambda: rule_inputs(HARD, False)[:5], lambda x, lengths: rule_anew(lengths, x)),
    "kernel of the convolution": (
        FEW,
        lambda: for_convolution_kernel(FEW)[::2],
        lambda x, lengths: convolution(x[0], torch.ones(WIDE, TAPS).to(x[0]), lengths, x[1]),
    ),
    "kernels of the rule": (
        FEW,
        lambda: for_rule_kernels(FEW, 1, 1, False),
        lambda x, lengths: delta_rule_kernels.delta_rule(x[0], x[1], x[2], x[3], x[4], lengths, None, False)[0],
    ),
}
"""Lengths, inputs by token, behind which what came before each sequence may be, and what is computed."""


@pytest.mark.parametrize(
    ("operation", "neighbour"),
    [
        *((name, place) for name in ("convolution", "rule") for place in range(0, len(HARD), amount(3, 1))),
        *((name, 1) for name in ("kernel of the convolution", "kernels of the rule")),  # it has others on both sides
    ],
)
def test_no_nan_crosses_forward_or_backward(operation: str, neighbour: int) -> None:
    """A neighbour whose inputs, and whose gradients, are NaN leaves the bits of all others as they are: those before it and behind it."""
    lengths, make, compute = OPERATIONS[operation]
    starts = [0, *itertools.accumulate(lengths)]
    theirs = slice(starts[neighbour], starts[neighbour + 1])
    clean = leaves(*make())
    others = torch.ones(sum(lengths), dtype=torch.bool, device=clean[0].device)
    others[theirs] = False
    by_token = [len(x) == sum(lengths) for x in clean]

    def run(inputs: list[Tensor], is_spoiled: bool) -> list[Tensor]:
        out = compute(inputs, tuple(lengths))
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if is_spoiled:
            weights[theirs] = torch.nan
        tokens = [x for x, by in zip(inputs, by_token, strict=True) if by]
        return [out, *torch.autograd.grad(out, tokens, weights.to(out))]

    expected = run(clean, is_spoiled=False)
    places = [theirs if by else slice(neighbour, neighbour + 1) for by in by_token]
    spoiled = [x.detach().clone() for x in clean]
    for x, place in zip(spoiled, places, strict=True):
        x[place] = torch.nan
    got = run(leaves(*spoiled), is_spoiled=True)
    for ours, wanted in zip(got, expected, strict=True):
        assert ours[theirs].isnan().all()
        assert torch.equal(ours[others], wanted[others])
