"""A linear layer with LoRA: one multiplication by the base for the whole row, then each adapter on its own slice of it.

    y = x W^T + bias,     y[slice] += (scale · x[slice] A^T) B^T

An adapter may also cover a part of the outputs alone: queries, keys or values of a fused projection.

The backward is written by hand. What adapters add, forward and backward, is added in place, so that a layer with LoRA reads and writes
its row no more often than one without; autograd would copy the row and add up two gradients of it. Weight and bias are frozen, unless
full-parameter training has put a model's own in their place for a pass.
"""

from collections.abc import Mapping
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tinsmith.models.layout import LoraTarget
from tinsmith.models.lora import ActiveSegments, Segment


class Part(NamedTuple):
    """Neighbouring slices of one length whose adapters have one rank: they are computed together, which on short slices costs as one."""

    start: int
    slices: int
    length: int
    scale: float
    columns: tuple[int, int] | None
    """Which outputs [start, end) they add to; None means all."""

    def continued_by(self, other: "Part") -> bool:
        """Whether `other` is one more such slice."""
        end = self.start + self.slices * self.length
        return (end, self.length, self.scale, self.columns) == (other.start, other.length, other.scale, other.columns)

    def outputs(self, row: Tensor) -> Tensor:
        """Its view of a row of outputs, as `of`, with its own columns alone."""
        mine = self.of(row)
        return mine if self.columns is None else mine[..., self.columns[0] : self.columns[1]]

    def of(self, row: Tensor) -> Tensor:
        """Its view of a row [tokens, width]: [length, width] of a single slice, [slices, length, width] of several."""
        if self.length == len(row):  # one adapter alone: many small operations are saved
            return row
        mine = row[self.start : self.start + self.slices * self.length]
        return mine if self.slices == 1 else mine.unflatten(0, (self.slices, self.length))


class LoraLinear(nn.Module):
    """A linear layer plus, on each segment of the row, that segment's adapter. Its parameters are those of the layer that it replaces."""

    def __init__(self, base: nn.Linear, targets: Mapping[str, LoraTarget], active: ActiveSegments) -> None:
        """`targets` are what adapters cover of the layer, by name."""
        super().__init__()
        self.weight = base.weight
        self.bias: nn.Parameter | None = base.bias
        self.columns = {name: target.rows for name, target in targets.items()}
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        """Map x [1, tokens, in_features] to [1, tokens, out_features]."""
        parts, matrices = pairs_of(self.columns, self.active.segments)
        compute: Any = _LoraLinear.apply if torch.is_grad_enabled() else _forward
        y: Tensor = compute(x[0], self.weight, self.bias, parts, *matrices)
        return y.unsqueeze(0)


def pairs_of(columns: Mapping[str, tuple[int, int] | None], segments: list[Segment]) -> tuple[list[Part], list[Tensor]]:
    """The parts of the row whose adapters cover the layer, and the matrices A, B, A, B and so on of their slices.

    `columns` names what adapters may cover of it, and the outputs that each adds to.
    """
    parts: list[Part] = []
    matrices: list[Tensor] = []
    for name, outputs in columns.items():
        for segment in segments:
            if segment.adapter is None or name not in segment.adapter.working:
                continue
            matrices += segment.adapter.working[name]
            part = Part(segment.start, 1, segment.end - segment.start, segment.adapter.scale, outputs)
            if parts and parts[-1].continued_by(part):
                parts[-1] = parts[-1]._replace(slices=parts[-1].slices + 1)
            else:
                parts.append(part)
    return parts, matrices


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Part], *matrices: Tensor) -> Tensor:
    """The layer without gradients: x [tokens, in] -> [tokens, out]."""
    y = linear(x, weight, bias)
    _add_adapters(y, x, parts, _stacked(parts, matrices))
    return y


def _stacked(parts: list[Part], matrices: tuple[Tensor, ...]) -> list[Tensor]:
    """A and B of each part: as they are of a single slice, [slices, ...] of several."""
    stacked: list[Tensor] = []
    start = 0
    for part in parts:
        mine = matrices[start : start + 2 * part.slices]
        stacked += mine if part.slices == 1 else (torch.stack(mine[::2]), torch.stack(mine[1::2]))
        start += len(mine)
    return stacked


def _add_adapters(y: Tensor, x: Tensor, parts: list[Part], stacked: list[Tensor]) -> list[Tensor]:
    """Add what the adapters make of x [tokens, in] to y [tokens, out]; returns x A^T of each part."""
    reduced = []
    for part, a, b in zip(parts, stacked[::2], stacked[1::2], strict=True):
        reduced.append(_product(part.of(x), a.mT))
        _add_product(part.outputs(y), reduced[-1], b.mT, part.scale)
    return reduced


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add scale · left @ right to `total`: matrices, or stacks of them. The multiplication scales: no operation of its own is needed."""
    (total.addmm_ if total.ndim == 2 else total.baddbmm_)(left, right, alpha=scale)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices, or of stacks of them, for which the operator takes half as long again."""
    return torch.bmm(left, right) if left.ndim == 3 else left @ right


def _scaled_product(left: Tensor, right: Tensor, scale: float, like: Tensor) -> Tensor:
    """The product of both, times scale; of the shape of `like`, which is not read."""
    return (torch.addmm if like.ndim == 2 else torch.baddbmm)(like, left, right, beta=0, alpha=scale)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, parts: list[Part], *matrices: Tensor) -> Tensor:
        y = linear(x, weight, bias)
        stacked = _stacked(parts, matrices)
        ctx.parts = parts
        ctx.save_for_backward(x, weight, *stacked, *_add_adapters(y, x, parts, stacked))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight, *saved = ctx.saved_tensors
        count = len(ctx.parts)
        stacked, reduced = saved[: 2 * count], saved[2 * count :]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dweight = dy.t() @ x if ctx.needs_input_grad[1] else None
        dbias = dy.sum(0) if ctx.needs_input_grad[2] else None
        found: list[Tensor] = []
        for part, a, b, u in zip(ctx.parts, stacked[::2], stacked[1::2], reduced, strict=True):
            dy_part = part.outputs(dy)
            du = _product(dy_part, b)
            da, db = _scaled_product(du.mT, part.of(x), part.scale, like=a), _scaled_product(dy_part.mT, u, part.scale, like=b)
            found += (da, db) if part.slices == 1 else chain.from_iterable(zip(da, db, strict=True))
            if dx is not None:
                _add_product(part.of(dx), du, a, part.scale)
        return dx, dweight, dbias, None, *found


def attach(model: nn.Module, targets: Mapping[str, LoraTarget], active: ActiveSegments) -> None:
    """Replace the linear layers of `model` that these targets are, or are parts of, by ones with LoRA."""
    for module, own in groupby(targets.items(), key=lambda item: item[1].module):
        parent, _, child = module.rpartition(".")
        linear: Any = model.get_submodule(module)
        setattr(model.get_submodule(parent), child, LoraLinear(linear, dict(own), active))
