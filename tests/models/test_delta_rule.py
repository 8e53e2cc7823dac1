"""Convolution and gated delta rule of packed sequences, values and gradients, against formulas token by token.

So are the Triton kernels, which an interpreter runs on a CPU. On a GPU they are believed when they have computed a
small row, and transformers computes in PyTorch.

Invariant: Hybrid models: convolution and delta rule equal their formulas, a packed row equals each sequence alone and
transformers, and no NaN crosses. Also: `tests/training/test_against_peft.py`.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.bases import DEVICE
from tests.extent import amount
from tinsmith.kernels import delta_chunks
from tinsmith.kernels import delta_rule as delta_rule_kernels
from tinsmith.kernels.convolution import convolution
from tinsmith.kernels.delta_chunks import chunks_of, delta_rule_in_chunks
from tinsmith.kernels.delta_nets import convolution_disagreement, disagreement, kernels_for
from tinsmith.models.base import BaseModel
from tinsmith.models.delta_rule import convolve, convolve_anew, gated_delta_rule, gated_delta_rule_anew

TAPS = 4
HARD = (1, 2, 3, 4, 63, 64, 65, amount(70, 130))
"""Lengths around those of chunks. The last has two or three of the longest."""
BOUNDS = {torch.float64: 1e-10, torch.float32: 2**-13, torch.bfloat16: 2**-7}
"""Relative bounds on errors: kernels keep float32 in two bfloat16, and the interpreter cuts numbers off."""

Numbers = list[Any]
"""Tensors, the last of them perhaps None."""
Operation = Callable[..., Sequence[Tensor]]
"""Of lengths and inputs; gives outputs, and perhaps the last states."""


def starts_and_ends(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *itertools.accumulate(lengths)]))


def recurrence(
    lengths: Sequence[int], query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Any
) -> list[Tensor]:
    """The outputs of the gated delta rule and the last states, one token after the other."""
    groups = value.shape[1] // key.shape[1]
    query, key = (
        (x / (x * x).sum(-1, keepdim=True).add(1e-6).sqrt()).repeat_interleave(groups, 1) for x in (query, key)
    )
    outs, after = [], []
    for index, (start, end) in enumerate(starts_and_ends(lengths)):
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2]) if before is None else before[index]
        for t in range(start, end):
            state = state * decay[t].exp()[:, None, None]
            update = beta[t][:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
            state = state + torch.einsum("hk,hv->hkv", key[t], update)
            outs.append(torch.einsum("hkv,hk->hv", state, query[t]) / key.shape[2] ** 0.5)
        after.append(state)
    return [torch.stack(outs), torch.stack(after)]


def taps_of(lengths: Sequence[int], x: Tensor, weight: Tensor, before: Any) -> list[Tensor]:
    """The outputs of the convolution and the last inputs, one token after the other."""
    outs, after = [], []
    for index, (start, end) in enumerate(starts_and_ends(lengths)):
        seen = list(x.new_zeros(TAPS - 1, x.shape[1]) if before is None else before[index])
        for t in range(start, end):
            seen.append(x[t])
            outs.append(silu(sum((seen[tap - TAPS] * weight[:, tap] for tap in range(TAPS)), x.new_zeros(x.shape[1]))))
        after.append(torch.stack(seen[1 - TAPS :]))
    return [torch.stack(outs), torch.stack(after)]


def rule(lengths: Sequence[int], *inputs: Any) -> Sequence[Tensor]:
    query, key, value, decay, beta, before = inputs
    return gated_delta_rule(query, key, value, decay, beta, tuple(lengths), before)


def rule_anew(lengths: Sequence[int], *inputs: Any) -> Sequence[Tensor]:
    """For sequences that begin here and are not continued."""
    query, key, value, decay, beta, *_ = inputs
    return [gated_delta_rule_anew(query, key, value, decay, beta, tuple(lengths))]


def rule_of_kernels(lengths: Sequence[int], *inputs: Any) -> Sequence[Tensor]:
    query, key, value, decay, beta, before = inputs
    found = delta_rule_kernels.delta_rule(query, key, value, decay, beta, tuple(lengths), before, before is not None)
    return found[: 1 + (before is not None)]


def drawing(lengths: Sequence[int], dtype: torch.dtype = torch.float64) -> Callable[..., Tensor]:
    """Makes random tensors of the shapes that it is given."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype).to(DEVICE)


def leaves(*tensors: Tensor | None) -> Numbers:
    """Of which gradients are asked."""
    return [None if x is None else x.detach().requires_grad_() for x in tensors]


def rule_inputs(lengths: Sequence[int], states: bool, key_dim: int = 5, dtype: torch.dtype = torch.float64) -> Numbers:
    """Random query, key, value, decay, beta and states; each two heads of values have one of keys."""
    drawn, tokens = drawing(lengths, dtype), sum(lengths)
    inputs = [
        drawn(tokens, 2, key_dim),
        drawn(tokens, 2, key_dim),
        drawn(tokens, 4, 3),
        -drawn(tokens, 4).abs(),
        drawn(tokens, 4).sigmoid(),
    ]
    return leaves(*inputs, drawn(len(lengths), 4, key_dim, 3) if states else None)


def for_rule_kernels(lengths: Sequence[int], key_heads: int, groups: int, states: bool) -> Numbers:
    """The same in the precisions that kernels take."""
    drawn, tokens, heads, width = drawing(lengths, torch.float32), sum(lengths), key_heads * groups, 16
    made = [drawn(tokens, count, width).bfloat16() for count in (key_heads, key_heads, heads)]
    made += [logsigmoid(drawn(tokens, heads) + 2), drawn(tokens, heads).sigmoid().bfloat16()]
    return leaves(*made, drawn(len(lengths), heads, width, width) if states else None)


def convolution_inputs(
    lengths: Sequence[int], states: bool, channels: int = 4, dtype: torch.dtype = torch.float64
) -> Numbers:
    """x in rows that are wider than it, weight and earlier inputs."""
    drawn = drawing(lengths)
    x = drawn(sum(lengths), channels + 6).to(dtype)[:, 3 : channels + 3]
    return leaves(
        x, drawn(channels, TAPS).to(dtype), drawn(len(lengths), TAPS - 1, channels).to(dtype) if states else None
    )


def values_and_gradients(
    operation: Operation, lengths: Sequence[int], inputs: Numbers, outputs: int | None = None
) -> list[Tensor]:
    """The outputs, or the first of them, and the gradients of a fixed random sum of these."""
    outs, drawn = operation(lengths, *inputs)[:outputs], drawing([0])
    weights = [drawn(*out.shape).bfloat16().to(out) for out in outs]
    return [
        x.detach()
        for x in (*outs, *torch.autograd.grad(outs, [x for x in inputs if x is not None and x.requires_grad], weights))
    ]


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.double() - theirs).norm() <= BOUNDS[ours.dtype] * (theirs.norm() + 0.1)


def assert_exact(operation: Operation, formula: Operation, lengths: Sequence[int], inputs: Numbers) -> None:
    """Values and gradients are those of the formula in float64, on the same numbers."""
    outputs = len(operation(lengths, *inputs))
    exact = [None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    assert_same(
        values_and_gradients(operation, lengths, inputs), values_and_gradients(formula, lengths, exact, outputs)
    )


@pytest.mark.parametrize("lengths", [HARD, (24, 3, 7)])
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("key_dim", [5, 24, 64])  # chunks of 16, 32 and 64 tokens
def test_the_rule_equals_the_recurrence(key_dim: int, states: bool, lengths: tuple[int, ...]) -> None:
    inputs = rule_inputs(lengths, states, key_dim)
    for operation in (rule,) if states else (rule, rule_anew):
        assert_exact(operation, recurrence, lengths, inputs)


def test_repeated_keys_in_float32() -> None:
    """Tokens whose keys are alike and whose states do not decay: what a series of powers would lose to cancellation."""
    inputs = rule_inputs([130], states=False, key_dim=64, dtype=torch.float32)
    alike = inputs[1][:1].expand_as(inputs[1]).clone()
    inputs = leaves(
        inputs[0], alike, inputs[2], torch.full_like(inputs[3], -1e-4), torch.full_like(inputs[4], 0.99), None
    )
    assert_exact(rule_anew, recurrence, [130], inputs)


@pytest.mark.parametrize(("lengths", "groups", "states"), [((1, 65), 2, True), ((amount(20, 130),), 1, False)])
def test_the_kernels_of_the_rule_equal_the_recurrence(lengths: tuple[int, ...], groups: int, states: bool) -> None:
    """Chunks of one token and of 64."""
    assert_exact(rule_of_kernels, recurrence, lengths, for_rule_kernels(lengths, 1, groups, states))


@pytest.mark.parametrize("states", [False, True])
def test_the_convolution_and_its_kernel_equal_the_formula(states: bool) -> None:
    def ours(lengths: Sequence[int], x: Tensor, weight: Tensor, before: Tensor | None) -> Sequence[Tensor]:
        return convolve(x, weight, tuple(lengths), before)

    def anew(lengths: Sequence[int], x: Tensor, weight: Tensor, _: None) -> Sequence[Tensor]:
        return [convolve_anew(x, weight, tuple(lengths))]

    def kernel(lengths: Sequence[int], x: Tensor, weight: Tensor, before: Tensor | None) -> Sequence[Tensor]:
        return [convolution(x, weight, tuple(lengths), before)]

    for lengths in ((1, 2, 3, 4, 65), (1, 1, 1)):
        for operation in (ours,) if states else (ours, anew):
            assert_exact(operation, taps_of, lengths, convolution_inputs(lengths, states))
    few = (1, 2, 3, amount(20, 66))
    x, weight, before = convolution_inputs(few, states, 130, torch.bfloat16)
    assert_exact(kernel, taps_of, few, [x, weight, before.detach() if states else None])


def test_heads_that_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, for the memory: kernels give the same bits."""
    inputs, given = rule_inputs([33, 5], states=True), for_rule_kernels((20,), 2, 1, states=True)
    whole, of_kernels = values_and_gradients(rule, [33, 5], inputs), values_and_gradients(rule_of_kernels, [20], given)
    monkeypatch.setattr(delta_chunks, "SLICE_NUMBERS", 1)
    monkeypatch.setattr(delta_rule_kernels, "STATE_BYTES", 1)
    assert_same(values_and_gradients(rule, [33, 5], inputs), whole)
    assert all(
        torch.equal(one, two)
        for one, two in zip(values_and_gradients(rule_of_kernels, [20], given), of_kernels, strict=True)
    )


def test_what_came_before_is_that_of_the_same_sequence() -> None:
    """A row that is cut anywhere, and goes on with what came before, has the bits of the whole row."""
    x, weight, _ = convolution_inputs((20,), True, 130, torch.bfloat16)
    whole = convolution(x, weight, (20,), None)
    for cut in (1, 2, 3, 11):
        _, after = convolve(x[:cut], weight, (cut,), None)
        assert torch.equal(convolution(x[cut:], weight, (20 - cut,), after), whole[cut:])


FEW = (3, amount(20, 66), 2)
NEIGHBOURS: dict[str, tuple[Sequence[int], Callable[[], Numbers], Operation]] = {
    "convolution": (
        HARD,
        lambda: convolution_inputs(HARD, False)[:1],
        lambda lengths, x: [convolve_anew(x, torch.ones(4, TAPS).to(x), tuple(lengths))],
    ),
    "rule": (HARD, lambda: rule_inputs(HARD, False)[:5], rule_anew),
    "kernel of the convolution": (
        FEW,
        lambda: convolution_inputs(FEW, True, 130, torch.bfloat16)[::2],
        lambda lengths, x, before: [convolution(x, torch.ones(130, TAPS).to(x), tuple(lengths), before)],
    ),
    "kernels of the rule": (
        FEW,
        lambda: for_rule_kernels(FEW, 1, 1, False)[:5],
        lambda lengths, *x: rule_of_kernels(lengths, *x, None),
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
    """A neighbour with NaN inputs and gradients leaves all others, before and behind it, as they are, bit for bit."""
    lengths, make, compute = NEIGHBOURS[operation]
    theirs, clean = slice(*starts_and_ends(lengths)[neighbour]), make()
    others = torch.ones(sum(lengths), dtype=torch.bool, device=clean[0].device)
    others[theirs] = False

    def run(inputs: Numbers, is_spoiled: bool) -> list[Tensor]:
        (out,) = compute(lengths, *inputs)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        if is_spoiled:
            weights[theirs] = torch.nan
        return [out, *torch.autograd.grad(out, [x for x in inputs if len(x) == sum(lengths)], weights.to(out))]

    spoiled = [x.detach().clone() for x in clean]
    for x in spoiled:
        x[theirs if len(x) == sum(lengths) else neighbour] = torch.nan
    for ours, wanted in zip(run(leaves(*spoiled), is_spoiled=True), run(clean, is_spoiled=False), strict=True):
        assert ours[theirs].isnan().all()
        assert torch.equal(ours[others], wanted[others])


class Altered(torch.autograd.Function):
    """Values times one number, with a gradient times another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: float, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return x * values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.gradient, None, None


def altered(tensors: Sequence[Any], place: int, values: float, gradient: float) -> list[Any]:
    """The tensors, of which one is altered; none at place -1."""
    make: Any = Altered.apply
    return [make(x, values, gradient) if number == place else x for number, x in enumerate(tensors)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        ((-1, 1, 1), (-1, 1, 1), ""),
        *(
            ((n, 1, 1.5), (-1, 1, 1), f"its gradients of {name} are 0.5 of")
            for n, name in enumerate(["query", "key", "value", "decay", "beta"])
        ),
        ((-1, 1, 1), (0, 2, 1), "its outputs are 1 of their norm"),
        ((-1, 1, 1), (1, torch.nan, 1), "its states are nan of their norm"),
    ],
)
def test_what_a_rule_computes_wrongly_is_found_by_name(inputs: Any, outputs: Any, found: str) -> None:
    """Our own code, called as kernels are, agrees with itself."""

    def rule(*arguments: Any) -> Any:
        query, key, value, decay, beta, lengths, before, keeps = altered(arguments, *inputs)
        chunks = chunks_of(lengths, key.shape[2], value.device)
        return tuple(altered(delta_rule_in_chunks(query, key, value, decay, beta, chunks, before, keeps), *outputs))

    said = disagreement(rule, torch.device(DEVICE), torch.bfloat16)
    assert said.startswith(found)
    assert bool(said) == bool(found)


@pytest.mark.parametrize(
    ("place", "found"), [(-1, ""), (0, "its gradients of x are 0.5 of"), (1, "its gradients of weight are 0.5 of")]
)
def test_what_a_convolution_computes_wrongly_is_found_by_name(place: int, found: str) -> None:
    def convolution(*arguments: Any) -> Tensor:
        x, weight, lengths, _ = altered(arguments, place, 1, 1.5)
        return convolve_anew(x, weight, lengths)

    said = convolution_disagreement(convolution, torch.device(DEVICE), torch.bfloat16)
    assert said.startswith(found)
    assert bool(said) == bool(found)


def test_bfloat16_on_cuda_runs_on_kernels_and_nothing_else_does() -> None:
    x = torch.zeros(1, device=DEVICE)
    assert kernels_for(x) is None
    assert kernels_for(x.half()) is None
    assert (kernels_for(x.bfloat16()) is not None) == (DEVICE == "cuda")


FUNCTIONS = [
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
]


def test_transformers_computes_in_pytorch_where_kernels_are_installed(
    hybrid_base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = hybrid_base.language_model.layers[0].linear_attn
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = layer(hidden)
    for name in FUNCTIONS:

        def kernel(*arguments: object, **keywords: object) -> None:
            raise AssertionError("a kernel was called")

        written = inspect.unwrap(getattr(modeling_qwen3_5, name))
        monkeypatch.setattr(modeling_qwen3_5, name, functools.wraps(written)(kernel))
    kernels = [getattr(modeling_qwen3_5, name) for name in FUNCTIONS]
    with pytest.raises(AssertionError, match="a kernel was called"):
        type(layer).forward(layer, hidden)
    assert torch.equal(layer(hidden), expected)
    assert [getattr(modeling_qwen3_5, name) for name in FUNCTIONS] == kernels  # as they were
