"""Chunked log-probabilities against the plain formula, values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter, LoraPair, Segment
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.logprobs import target_logprobs

HIDDEN, VOCABULARY, RANK = 12, 40, 3


def head_adapter(seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pair = LoraPair(torch.randn(RANK, HIDDEN, generator=generator), torch.randn(VOCABULARY, RANK, generator=generator) * 0.1)
    return Adapter(LoraShape(RANK, 0), {LM_HEAD: pair}, torch.float32)


def plain_logprobs(hidden: Tensor, head: Tensor, adapter: Adapter | None, targets: Tensor) -> Tensor:
    weight = head
    if adapter is not None:
        pair = adapter.working[LM_HEAD]
        weight = head + 32 / RANK * pair.b @ pair.a
    return (hidden @ weight.t()).log_softmax(-1).gather(-1, targets)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 17),
    width=st.integers(1, 4),
    chunk=st.integers(1, 20),
    keep=st.booleans(),
    cuts=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    wanted=st.sampled_from([0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_equal_the_plain_formula(
    tokens: int, width: int, chunk: int, keep: bool, cuts: tuple[int, int], wanted: float, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (tokens, width))
    grad = torch.randn(tokens, width) * (torch.rand(tokens, 1) < wanted)
    first, last = head_adapter(seed), head_adapter(seed + 1)
    start, end = sorted(min(cut, tokens) for cut in cuts)
    every = [Segment(0, start, first), Segment(start, end, None), Segment(end, tokens, last)]
    segments = [s for s in every if s.start < s.end]

    got = target_logprobs(hidden, head, targets, segments, chunk, keep)
    expected = torch.cat([plain_logprobs(hidden[s.start : s.end], head, s.adapter, targets[s.start : s.end]) for s in segments])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

    leaves = [hidden, head, *first.leaves(), *last.leaves()]
    ours = torch.autograd.grad(got, leaves, grad, allow_unused=True)
    plain = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("chunk", "keep"), [(8, True), (8, False), (2, False)])
def test_a_nan_stays_with_its_rows_and_its_adapter(chunk: int, keep: bool) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(6, HIDDEN, requires_grad=True), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (6, 1))
    sick, well = head_adapter(0), head_adapter(1)
    segments = [Segment(0, 3, sick), Segment(3, 6, well)]

    def run() -> tuple[Tensor, ...]:
        got = target_logprobs(hidden, head, targets, segments, chunk, keep)
        return got, *torch.autograd.grad(got.sum(), [hidden, *well.leaves()])

    expected = run()
    with torch.no_grad():
        sick.working[LM_HEAD].b[5] = float("nan")
    got = run()
    assert got[0][:3].isnan().all()
    for mine, before in zip(got, expected, strict=True):
        cut = slice(3, 6) if mine.shape[0] == len(hidden) else slice(None)
        assert torch.equal(mine[cut], before[cut])


def test_a_row_without_gradient_gets_none_where_its_logits_are_no_numbers() -> None:
    hidden = torch.randn(3, HIDDEN)
    hidden[1] = float("nan")
    hidden.requires_grad_()
    got = target_logprobs(hidden, torch.randn(VOCABULARY, HIDDEN), torch.tensor([[1], [2], [3]]), [Segment(0, 3, None)], 8, keep=True)
    (grad,) = torch.autograd.grad(got, [hidden], torch.tensor([[1.0], [0.0], [1.0]]))
    assert torch.equal(grad[1], torch.zeros(HIDDEN))
    assert grad.isfinite().all()


def test_rows_without_gradient_leave_no_trace_even_where_the_logprob_is_minus_infinity() -> None:
    hidden = torch.zeros(2, HIDDEN, requires_grad=True)
    head = torch.zeros(VOCABULARY, HIDDEN)
    head[1] = float("-inf")
    with torch.no_grad():
        hidden[:, 0] = 1.0
        head[1, 1:] = 0.0
    got = target_logprobs(hidden, head, torch.tensor([[1], [2]]), [Segment(0, 2, None)], chunk=8)
    assert got[0, 0] == float("-inf")
    (grad,) = torch.autograd.grad(got, [hidden], torch.tensor([[0.0], [0.0]]))
    assert torch.equal(grad, torch.zeros_like(hidden))


@pytest.mark.parametrize("width", [1, 3])
def test_a_target_that_occurs_twice_gets_both_gradients(width: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1, HIDDEN, requires_grad=True)
    head = torch.randn(VOCABULARY, HIDDEN)
    targets = torch.full((1, width), 7)
    (many,) = torch.autograd.grad(target_logprobs(hidden, head, targets, [Segment(0, 1, None)], 4).sum(), [hidden])
    (one,) = torch.autograd.grad(target_logprobs(hidden, head, targets[:, :1], [Segment(0, 1, None)], 4).sum(), [hidden])
    torch.testing.assert_close(many, width * one)
