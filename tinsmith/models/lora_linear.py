"""A linear layer with LoRA: one multiplication by the base for the whole row, then each adapter on its own slice of it.

    y = x W^T + bias,     y[slice] += (scale · x[slice] A^T) B^T

The backward is written by hand. What adapters add, forward and backward, is added in place, so that a layer with LoRA reads and writes
its row no more often than one without; autograd would copy the row and add up two gradients of it. Weight and bias are frozen, unless
full-parameter training has put a model's own in their place for a pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tinsmith.models.lora import ActiveSegments, Segment


class Part(NamedTuple):
    """Where one adapter works, and its scale."""

    rows: slice
    scale: float


class LoraLinear(nn.Module):
    """A linear layer plus, on each segment of the row, that segment's adapter. Its parameters are those of the layer that it replaces."""

    def __init__(self, base: nn.Linear, name: str, active: ActiveSegments) -> None:
        super().__init__()
        self.weight = base.weight
        self.bias: nn.Parameter | None = base.bias
        self.name = name
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Map x [1, tokens, in_features] to [1, tokens, out_features]."""
        parts, matrices = pairs_of(self.name, self.active.segments)
        compute: Any = _LoraLinear.apply if torch.is_grad_enabled() else _forward
        y: Tensor = compute(x[0], self.weight, self.bias, parts, *matrices)
        return y.unsqueeze(0)


def pairs_of(name: str, segments: list[Segment]) -> tuple[list[Part], list[Tensor]]:
    """The parts of the row whose adapter covers the module `name`, and their matrices A, B, A, B and so on."""
    parts: list[Part] = []
    matrices: list[Tensor] = []
    for segment in segments:
        if segment.adapter is not None and name in segment.adapter.working:
            parts.append(Part(slice(segment.start, segment.end), segment.adapter.scale))
            matrices += segment.adapter.working[name]
    return parts, matrices


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Part], *matrices: Tensor) -> Tensor:
    """The layer without gradients: x [tokens, in] -> [tokens, out]."""
    y = linear(x, weight, bias)
    for (rows, scale), a, b in zip(parts, matrices[::2], matrices[1::2], strict=True):
        y[rows].addmm_(linear(x[rows], a).mul_(scale), b.t())
    return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Part], *matrices: Tensor) -> Tensor:
        y = linear(x, weight, bias)
        reduced = []
        for (rows, scale), a, b in zip(parts, matrices[::2], matrices[1::2], strict=True):
            reduced.append(linear(x[rows], a).mul_(scale))  # [rows, rank]
            y[rows].addmm_(reduced[-1], b.t())
        ctx.parts = parts
        ctx.save_for_backward(x, weight, *matrices, *reduced)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, *saved = ctx.saved_tensors
        count = len(ctx.parts)
        matrices, reduced = saved[: 2 * count], saved[2 * count :]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dweight = dy.t() @ x if ctx.needs_input_grad[1] else None
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        found: list[Tensor | None] = []
        for (rows, scale), a, b, u in zip(ctx.parts, matrices[::2], matrices[1::2], reduced, strict=True):
            du = (dy[rows] @ b).mul_(scale)
            found += [du.t() @ x[rows], dy[rows].t() @ u]
            if dx is not None:
                dx[rows].addmm_(du, a)
        return dx, dweight, dbias, None, *found


def attach(model: nn.Module, suffixes: tuple[str, ...], active: ActiveSegments) -> dict[str, tuple[int, int]]:
    """Replace every linear layer of `model` whose last name part is in `suffixes`; return (in_features, out_features) by module name."""
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.rpartition(".")[2] in suffixes
    }
    for name, module in found.items():
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], LoraLinear(module, name, active))
    return {name: (module.in_features, module.out_features) for name, module in found.items()}
