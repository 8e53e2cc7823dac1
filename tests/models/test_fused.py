"""Linear layers behind the pieces of a decoder layer against plain formulas: values, and gradients written by hand.

Norms of modules are compared with transformers. Heads and gates are what `test_decoder.py` compares, in float64 too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5RMSNormGated

from tests.bases import DEVICE
from tinsmith.models.fused import GatedNormed, Normed, SigmoidGated, SwiGLU
from tinsmith.models.joined_linear import JoinedLinear, WeightPiece
from tinsmith.models.layout import Projection
from tinsmith.models.lora import Adapter, LoraPair, Segment
from tinsmith.models.norms import FusedRMSNorm, GatedRMSNorm, ZeroCentredRMSNorm, fuse_norms
from tinsmith.models.packed_lora import UNCHANGED, Before, SegmentAdapters
from tinsmith.protocol.shapes import LoraShape

TOKENS, WIDTH, EPS = 5, 6, 1e-3
ROWS = {"attn.q_proj": (0, 3), "attn.k_proj": (4, 6), "attn.v_proj": (6, 8)}
"""What adapters cover of the layer's nine outputs: two of them belong to no target, and two targets are neighbours of one size."""


def random(*size: int, seed: int = 0) -> Tensor:
    """Leaves in float64, where a wrong term cannot hide."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE).requires_grad_()


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight, EPS)


PIECES: dict[str, tuple[Before, list[tuple[int, ...] | None], Callable[..., tuple[Tensor, ...]]]] = {
    "unchanged": (UNCHANGED, [(TOKENS, WIDTH)], lambda x: (x,)),
    "norm": (Normed(EPS, False), [(TOKENS, WIDTH), None, (WIDTH,)], lambda x, _, w: (normed(x, w), x)),
    "sum and norm": (
        Normed(EPS, False),
        [(TOKENS, WIDTH), (TOKENS, WIDTH), (WIDTH,)],
        lambda x, delta, w: (normed(x + delta, w), x + delta),
    ),
    "zero-centred norm": (
        Normed(EPS, True),
        [(TOKENS, WIDTH), (TOKENS, WIDTH), (WIDTH,)],
        lambda x, delta, w: (normed(x + delta, 1 + w), x + delta),
    ),
    "swiglu": (SwiGLU(), [(TOKENS, 2 * WIDTH)], lambda x: (silu(x[:, :WIDTH]) * x[:, WIDTH:],)),
    "sigmoid gate": (SigmoidGated(), [(TOKENS, 2, 3), (TOKENS, 2, 3)], lambda x, g: ((x * g.sigmoid()).flatten(1),)),
    "gated norm": (
        GatedNormed(EPS),
        [(TOKENS, 2, 3), (TOKENS, 2, 3), (3,)],
        lambda x, g, w: ((rms_norm(x, w.shape, w, EPS) * silu(g)).flatten(1),),
    ),
}


def layer(pieces: int, bias: bool) -> tuple[JoinedLinear, list[Tensor]]:
    """A joined linear layer whose weights lie in one tensor or in two, and these leaves."""
    bounds = [(0, 9)] if pieces == 1 else [(0, 4), (4, 9)]
    own = [
        WeightPiece(rows, random(rows[1] - rows[0], WIDTH, seed=1), random(rows[1] - rows[0], seed=2) if bias else None) for rows in bounds
    ]
    linear = JoinedLinear(Projection("x", ("a", "b")[:pieces], ROWS, WIDTH, 9), tuple(bounds), tuple(own))
    return linear, [tensor for piece in own for tensor in (piece.weight, piece.bias) if tensor is not None]


def adapter(rank: int, seed: int, names: tuple[str, ...] = tuple(ROWS)) -> Adapter:
    """One that covers these targets."""
    pairs = {
        name: LoraPair(random(rank, WIDTH, seed=seed).detach(), random(end - start, rank, seed=seed + 1).detach())
        for name, (start, end) in ROWS.items()
        if name in names
    }
    return Adapter(LoraShape(rank, 0), pairs, torch.float64)


SEGMENTS: dict[str, list[Segment]] = {
    "the base": [Segment(0, TOKENS, None)],
    "one adapter": [Segment(0, TOKENS, adapter(2, 10))],
    "equal slices": [Segment(0, 2, adapter(2, 20)), Segment(2, 4, adapter(2, 30)), Segment(4, 5, None)],
    "other ranks and targets": [
        Segment(0, 2, adapter(2, 40)),
        Segment(2, 3, adapter(3, 50, ("attn.v_proj",))),
        Segment(3, 4, adapter(1, 60)),
        Segment(4, 5, adapter(1, 65, ("attn.q_proj", "attn.v_proj"))),
    ],
}


def plain_layer(h: Tensor, linear: JoinedLinear, segments: list[Segment]) -> Tensor:
    """What the layer gives for its input h [tokens, in], as the formula says it."""
    y = torch.cat([h @ w.t() + (0 if bias is None else bias) for _, w, bias in linear.pieces], 1)
    for segment in segments:
        for name, (a, b) in {} if segment.adapter is None else segment.adapter.working.items():
            assert segment.adapter is not None
            added = torch.zeros_like(y)
            (first, last), rows = ROWS[name], slice(segment.start, segment.end)
            added[rows, first:last] = segment.adapter.scale * (h[rows] @ a.t()) @ b.t()
            y = y + added
    return y


def assert_gradients(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    """The same values, and the same gradients of a random sum of them."""
    weights = [random(*one.shape, seed=70 + i).detach() for i, one in enumerate(ours)]
    found, expected = (
        [*outputs, *torch.autograd.grad(sum(((x * w).sum() for x, w in zip(outputs, weights, strict=True)), torch.zeros(())), leaves)]
        for outputs in (ours, theirs)
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("who", SEGMENTS)
@pytest.mark.parametrize(("pieces", "bias"), [(1, False), (1, True), (2, True)])
@pytest.mark.parametrize("what", PIECES)
def test_a_linear_layer_behind_a_piece_equals_the_formulas(what: str, pieces: int, bias: bool, who: str) -> None:
    before, shapes, formula = PIECES[what]
    inputs = [None if shape is None else random(*shape, seed=80 + i) for i, shape in enumerate(shapes)]
    (linear, weights), segments = layer(pieces, bias), SEGMENTS[who]
    ours = SegmentAdapters(segments).project(linear, before, *inputs)
    h, *others = formula(*inputs)
    of_adapters = [leaf for segment in segments if segment.adapter is not None for leaf in segment.adapter.leaves()]
    assert_gradients(ours, (plain_layer(h, linear, segments), *others), [*(x for x in inputs if x is not None), *weights, *of_adapters])
    with torch.no_grad():
        h, _, _ = before.forward(*inputs)
        torch.testing.assert_close(SegmentAdapters(segments).apply(linear, h), ours[0], rtol=1e-12, atol=1e-12)


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    linear, _ = layer(1, False)
    frozen = JoinedLinear(linear.projection, linear.rows, (WeightPiece((0, 9), linear.weight.detach(), None),))
    x, weight = random(TOKENS, WIDTH), random(WIDTH).detach()
    y, total = SegmentAdapters([Segment(0, TOKENS, None)]).project(frozen, Normed(EPS, False), x, None, weight)
    (found,) = torch.autograd.grad(y.sum() + total.sum(), x)
    h, other = normed(x, weight), x
    (expected,) = torch.autograd.grad((h @ frozen.weight.t()).sum() + other.sum(), x)
    torch.testing.assert_close(found, expected)


NORMS: list[tuple[type[nn.Module], type[nn.Module]]] = [
    (Qwen3RMSNorm, FusedRMSNorm),
    (GemmaRMSNorm, ZeroCentredRMSNorm),
    (Qwen3_5RMSNorm, ZeroCentredRMSNorm),
    (Qwen3_5RMSNormGated, GatedRMSNorm),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("theirs", "ours"), NORMS)
def test_norms_equal_those_of_transformers(theirs: type[nn.Module], ours: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain: Any
    fused: Any
    plain, fused = (nn.ModuleDict({"norm": theirs(48, eps=1e-5)}).to(DEVICE, dtype) for _ in range(2))
    plain["norm"].weight.data.uniform_(0.5, 6)
    fused.load_state_dict(plain.state_dict())
    assert fuse_norms(fused) == 1
    assert type(fused["norm"]) is ours
    inputs = [torch.randn(1, 9, 48).to(DEVICE, dtype).requires_grad_() for _ in range(1 + (ours is GatedRMSNorm))]
    grad = torch.randn(1, 9, 48).to(DEVICE, dtype)

    def answers(norm: nn.Module) -> list[Tensor]:
        out = norm(*inputs)
        return [out, *torch.autograd.grad(out, [*inputs, *norm.parameters()], grad)]

    bound = 4 * torch.finfo(dtype).eps
    for got, expected in zip(answers(fused["norm"]), answers(plain["norm"]), strict=True):
        torch.testing.assert_close(got, expected, rtol=8 * bound, atol=8 * bound)


def test_a_norm_that_computes_something_else_stays() -> None:
    class HalvedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            halved: Tensor = super().forward(hidden_states) / 2
            return halved

    model = nn.ModuleDict({"halved": HalvedRMSNorm(16), "layer": nn.LayerNorm(16)})
    assert fuse_norms(model) == 0
    assert isinstance(model["halved"], HalvedRMSNorm)
