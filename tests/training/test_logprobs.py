"""Chunked log-probabilities against the plain formula, values and gradients."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bases import DEVICE
from tests.extent import amount
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter, LoraPair, Segment, adapter_of
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.logprobs import target_logprobs

HIDDEN, VOCABULARY, RANK = 12, 40, 3


def head_adapter(seed: int, dtype: torch.dtype = torch.float32) -> Adapter:
    generator = torch.Generator("cpu").manual_seed(seed)
    a, b = (torch.randn(shape, generator=generator, device="cpu") for shape in ((RANK, HIDDEN), (VOCABULARY, RANK)))
    pair = LoraPair(a, b * 0.1)
    return adapter_of(LoraShape(RANK, 0), {LM_HEAD: pair}, dtype, device=torch.device(DEVICE))


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    """Tensors are made on the device that is tested."""
    with torch.device(DEVICE):
        yield


def plain_logprobs(hidden: Tensor, head: Tensor, adapter: Adapter | None, targets: Tensor) -> Tensor:
    weight = head
    if adapter is not None:
        pair = adapter.working[LM_HEAD]
        weight = head + 32 / RANK * pair.b @ pair.a
    return (hidden @ weight.t()).log_softmax(-1).gather(-1, targets)


@settings(max_examples=amount(20, 60), deadline=None)
@given(
    tokens=st.integers(1, 17),
    width=st.integers(1, 4),
    chunk=st.integers(1, 20),
    keep=st.integers(0, 20),
    said=st.booleans(),
    cuts=st.tuples(st.integers(0, 17), st.integers(0, 17)),
    wanted=st.sampled_from([0.2, 0.6, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_equal_the_plain_formula(
    tokens: int, width: int, chunk: int, keep: int, said: bool, cuts: tuple[int, int], wanted: float, seed: int
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

    got = target_logprobs(
        hidden, head, targets, segments, chunk, keep, grad.ne(0).any(-1).cpu().numpy() if said else None
    )
    expected = torch.cat(
        [plain_logprobs(hidden[s.start : s.end], head, s.adapter, targets[s.start : s.end]) for s in segments]
    )
    leaves = [hidden, head, *first.leaves(), *last.leaves()]
    ours, plain = ([out, *torch.autograd.grad(out, leaves, grad, materialize_grads=True)] for out in (got, expected))
    for mine, other in zip(ours, plain, strict=True):
        assert (mine - other).norm() <= 2e-5 * (other.norm() + 1)  # for one number, rounding has no such bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("chunk", "keep"), [(8, 8), (8, 0), (2, 4)])
def test_a_nan_stays_with_its_rows_and_its_adapter(chunk: int, keep: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(6, HIDDEN, dtype=dtype, requires_grad=True), torch.randn(VOCABULARY, HIDDEN, dtype=dtype)
    targets = torch.randint(0, VOCABULARY, (6, 1))
    sick, well = head_adapter(0, dtype), head_adapter(1, dtype)

    def run() -> tuple[Tensor, ...]:
        got = target_logprobs(hidden, head, targets, [Segment(0, 3, sick), Segment(3, 6, well)], chunk, keep)
        return got, *torch.autograd.grad(got.sum(), [hidden, *well.leaves()])

    expected = run()
    with torch.no_grad():
        sick.working[LM_HEAD].b[5] = float("nan")
    got = run()
    assert got[0][:3].isnan().all()
    for mine, before in zip(got, expected, strict=True):
        cut = slice(3, 6) if mine.shape[0] == len(hidden) else slice(None)
        assert torch.equal(mine[cut], before[cut])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("said", [False, True])
def test_a_row_without_gradient_gets_none_where_its_logits_are_no_numbers(
    dtype: torch.dtype, width: int, said: bool
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, HIDDEN).to(dtype)
    hidden[1] = float("nan")
    hidden.requires_grad_()
    adapter = head_adapter(0, dtype)
    head, targets = torch.randn(VOCABULARY, HIDDEN).to(dtype), torch.arange(3 * width).view(3, width)
    wanted = np.array([True, False, True]) if said else None
    got = target_logprobs(hidden, head, targets, [Segment(0, 3, adapter if said else None)], 8, 8, wanted)
    leaves = [hidden, *(adapter.leaves() if said else [])]
    found = torch.autograd.grad(got, leaves, torch.tensor([[1.0], [0.0], [1.0]]).expand(3, width))
    assert torch.equal(found[0][1], torch.zeros(HIDDEN, dtype=dtype))
    assert all(grad.isfinite().all() for grad in found)
    got = target_logprobs(hidden[:1], head, targets[:1], [Segment(0, 1, adapter)], 2, 8, np.zeros(1, dtype=bool))
    assert not any(grad.any() for grad in torch.autograd.grad(got.sum(), [hidden, *adapter.leaves()]))


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


@pytest.mark.parametrize("width", [1, 2])
def test_bfloat16_is_no_further_off_than_a_softmax_in_float32(width: int) -> None:
    """Values and gradients against float64, beside those of logits that are copied to float32 and a log_softmax of
    them."""
    torch.manual_seed(0)
    hidden = torch.randn(200, 64).bfloat16()
    head = (torch.randn(500, 64) * 0.4).bfloat16()
    targets = (hidden.float() @ head.float().t()).topk(width).indices.roll(1, 0)
    targets[::2] = targets.roll(-1, 0)[::2]  # every second one is likely: there g (1 - p) is a small difference
    grad = torch.randn(200, width)

    def of(compute: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, head)]
        got = compute(*leaves)
        return [t.double() for t in (got, *torch.autograd.grad(got, leaves, grad.to(got.dtype)))]

    def plain(h: Tensor, w: Tensor) -> Tensor:
        z = h @ w.t()
        return (z if z.dtype == torch.float64 else z.float()).log_softmax(-1).gather(-1, targets)

    exact = of(plain, torch.float64)
    usual = [(a - b).abs().mean().item() for a, b in zip(of(plain, torch.bfloat16), exact, strict=True)]
    ours = of(lambda h, w: target_logprobs(h, w, targets, [Segment(0, 200, None)], 64, 256), torch.bfloat16)
    for mine, other, want in zip(ours, usual, exact, strict=True):
        assert (mine - want).abs().mean().item() <= 1.05 * other  # gradients of both round dz and the products once
