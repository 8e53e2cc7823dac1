"""Packed attention is causal attention of each sequence alone, in values and gradients."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models.pass_plan import PackedPlan

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def alone(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of one sequence written out, shapes as in `PassPlan.attend`."""
    query, key, value = (x.repeat_interleave(HEADS // x.shape[1], 1).transpose(0, 1) for x in (query, key, value))
    distance = torch.arange(query.shape[1], device=DEVICE).unsqueeze(1) - torch.arange(query.shape[1], device=DEVICE)
    unseen = (distance < 0) | (distance >= (window or len(distance)))
    scores = (query @ key.transpose(1, 2) * scale).masked_fill(unseen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8), window=st.none() | st.integers(1, 45), seed=st.integers(0, 1000))
def test_packed_equals_each_alone(lengths: list[int], window: int | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DEVICE).requires_grad_()

    rows = random(tokens, HEADS, WIDTH), random(tokens, KV_HEADS, WIDTH), random(tokens, KV_HEADS, WIDTH)
    weights = random(tokens, HEADS, WIDTH)
    pieces = zip(*(x.split(lengths) for x in rows), strict=True)
    expected = torch.cat([alone(q, k, v, 0.3, window) for q, k, v in pieces])
    plan = PackedPlan(lengths, torch.device(DEVICE), torch.float32)
    got = plan.attend(0, *rows, 0.3, window)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for one, together in zip(torch.autograd.grad(expected, rows, weights), torch.autograd.grad(got, rows, weights), strict=True):
        torch.testing.assert_close(together, one, rtol=1e-5, atol=1e-5)
