"""A linear layer with adapters against the plain formula, values and gradients, however the row is divided among them."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.bases import DEVICE
from tinsmith.models.layout import LoraTarget
from tinsmith.models.lora import ActiveSegments, Adapter, LoraPair, Segment
from tinsmith.models.lora_linear import LoraLinear
from tinsmith.protocol.shapes import LoraShape

INPUTS, OUTPUTS = 6, 5


def adapter(rank: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pair = LoraPair(torch.randn(rank, INPUTS, generator=generator), torch.randn(OUTPUTS, rank, generator=generator))
    return Adapter(LoraShape(rank, 0), {"x": LoraPair(pair.a.double().to(DEVICE), pair.b.double().to(DEVICE))}, torch.float64)


def plain(layer: nn.Linear, x: Tensor, segment: Segment) -> Tensor:
    y: Tensor = layer(x)
    if segment.adapter is None:
        return y
    a, b = segment.adapter.working["x"]
    return y + segment.adapter.scale * (x @ a.t()) @ b.t()


@settings(max_examples=60, deadline=None)
@given(slices=st.lists(st.tuples(st.sampled_from([2, 3]), st.sampled_from([None, 2, 4])), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_values_and_gradients_equal_the_plain_formula(slices: list[tuple[int, int | None]], seed: int) -> None:
    torch.manual_seed(seed)
    # In float64, where terms that cancel out still leave digits to compare.
    layer = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64).to(DEVICE).requires_grad_(False)
    active = ActiveSegments()
    start = 0
    for number, (length, rank) in enumerate(slices):
        active.segments.append(Segment(start, start + length, None if rank is None else adapter(rank, number)))
        start += length
    x = torch.randn(start, INPUTS, dtype=torch.float64, device=DEVICE, requires_grad=True)
    grad = torch.randn(start, OUTPUTS, dtype=torch.float64, device=DEVICE)
    leaves = [x, *(leaf for s in active.segments if s.adapter is not None for leaf in s.adapter.leaves())]

    expected = torch.cat([plain(layer, x[s.start : s.end], s) for s in active.segments])
    module = LoraLinear("x", layer, {"x": LoraTarget("attn", "x", INPUTS, OUTPUTS)}, active)
    got = module(x.unsqueeze(0))[0]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        assert torch.equal(module(x.unsqueeze(0))[0], got)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
