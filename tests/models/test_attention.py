"""Packed attention is causal attention of each sequence alone, in values and gradients."""

import pytest
import torch
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


ROWS = {
    "equal, cuDNN": ([600, 600], None, True),
    "one sequence, cuDNN": ([513], None, True),
    "ragged": ([700, 130, 1], None, False),
    "window": ([600, 600], 100, False),
}
"""Lengths, window, and whether a GPU computes them as a batch of equal lengths."""


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("name", ROWS)
def test_packed_is_each_alone_and_no_nan_reaches_a_neighbour(name: str, dtype: torch.dtype, bound: float) -> None:
    """Within 1 % in half precision: bfloat16 keeps numbers to 0.4 %, and what lies between is rounded too.

    The reference is float32 on the same numbers. Heads are as wide as those of published models, so that every kernel takes them.
    """
    lengths, window, dense = ROWS[name]
    generator, tokens = torch.Generator().manual_seed(0), sum(lengths)
    sizes = (tokens, HEADS, 64), (tokens, KV_HEADS, 64), (tokens, KV_HEADS, 64), (tokens, HEADS, 64)
    *rows, weights = (torch.randn(size, generator=generator).to(DEVICE, dtype).requires_grad_() for size in sizes)
    plan = PackedPlan(lengths, torch.device(DEVICE), dtype)
    assert plan.is_dense(window) == dense
    got = plan.attend(0, *rows, 0.3, window)
    exact = [x.detach().float().requires_grad_() for x in rows]
    expected = torch.cat([alone(q, k, v, 0.3, window) for q, k, v in zip(*(x.split(lengths) for x in exact), strict=True)])
    found = torch.autograd.grad(got, rows, weights)
    for one, other in zip((got, *found), (expected, *torch.autograd.grad(expected, exact, weights.float())), strict=True):
        assert (one.detach().float() - other.detach()).norm() < bound * other.detach().norm()
    with torch.no_grad():
        for x in rows:
            x[: lengths[0]] = torch.nan
    got = plan.attend(0, *rows, 0.3, window)
    for x in (got, *torch.autograd.grad(got, rows, torch.ones_like(got))):
        assert torch.isfinite(x[lengths[0] :]).all()
