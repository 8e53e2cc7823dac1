"""Linear layers over a packed row with LoRA: one base multiplication for the row, then each adapter on its slice.

    y = h W^T + bias,     y[slice, rows] += scale · (h[slice] A^T) B^T     for each target, with its rows of outputs

`h` is the input itself, or what a `Before` makes of it: a norm, an activation. Together they are one node of the
autograd graph, which keeps the input alone and computes `h` again in its backward.

The backward is written by hand. Adapters add in place, and the A's of all targets of a projection are one matrix, so
that a layer with LoRA reads and writes its row hardly more often than one without.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.models.experts import ExpertStack, mix, owners_of
from tinsmith.models.fused import UNCHANGED, Before
from tinsmith.models.joined_linear import JoinedLinear
from tinsmith.models.lora import Adapter, Segment, StackedMatrices, TargetGroup


class Adapters(ABC):
    """Adds LoRA to the linear layers of a pass."""

    @abstractmethod
    def apply(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        """The layer with the adapters of the tokens: x [tokens, in] -> [tokens, out]."""

    def route(self, stack: ExpertStack, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens h [tokens, hidden]; see `ExpertStack.route`."""
        return stack.route(h, choose)

    @abstractmethod
    def mix(self, stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """A mixture of experts with the adapters of the tokens: h [tokens, hidden] -> [tokens, hidden].

        `weights` and `chosen` are those of `route`.
        """

    def project(self, linear: JoinedLinear, before: Before, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """The layer behind `before`: [tokens, out], and the other results of `before`.

        Without gradients, unless a class says otherwise.
        """
        h, others, _ = before.forward(*inputs)
        return self.apply(linear, h), *others


class SegmentAdapters(Adapters):
    """The adapters of a packed row; differentiable in inputs, adapters, and weights that require gradients."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._owners: dict[tuple[int, ...], Tensor] = {}

    def apply(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.project(linear, UNCHANGED, x)[0]
        y = linear.multiply(x)
        for part in parts_of(linear, self.segments):
            part.add(y, x)
        return y

    def mix(self, stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return mix(stack, h, weights, chosen, owners_of(stack.name, self.segments, self._owners, h))

    def project(self, linear: JoinedLinear, before: Before, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        if not torch.is_grad_enabled():
            return super().project(linear, before, *inputs)
        parts = parts_of(linear, self.segments)
        weights = chain.from_iterable((piece.weight, piece.bias) for piece in linear.pieces)
        compute: Any = _Projected.apply
        y, *others = compute(
            linear, before, parts, len(inputs), *inputs, *weights, *chain.from_iterable(part.leaves for part in parts)
        )
        return y, *others


class Part(NamedTuple):
    """Neighbouring slices of one length whose adapters have one rank: computed together, short ones cost as one."""

    start: int
    slices: int
    length: int
    rank: int
    scale: float
    targets: int
    a: Tensor
    """The A's one below the other: [targets · rank, in] of a single slice, [slices, targets · rank, in] of several."""
    groups: tuple[TargetGroup, ...]
    """The targets; of several slices each is a group of its own, with B [slices, width, rank]."""
    leaves: tuple[Tensor, ...]
    """A and B of each target of each slice."""

    def of(self, row: Tensor) -> Tensor:
        """A view of a row [tokens, width]: [length, width] of a single slice, [slices, length, width] of several."""
        if self.length == row.shape[0]:  # one adapter alone: many small operations are saved
            return row
        mine = row.narrow(0, self.start, self.slices * self.length)
        return mine if self.slices == 1 else mine.unflatten(0, (self.slices, self.length))

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Add what the adapters make of x [tokens, in] to y [tokens, out]; returns x A^T."""
        reduced, mine = _product(self.of(x), self.a.mT), self.of(y)
        for group in self.groups:
            _add_product(_outputs(mine, group), self._reduced(reduced, group), group.b.mT, self.scale)
        return reduced

    def reduce_gradient(self, dy: Tensor) -> Tensor:
        """The gradient of x A^T but for the scale, from that of the output dy [tokens, out]."""
        mine = self.of(dy)
        if self.targets == 1:
            return _product(_outputs(mine, self.groups[0]), self.groups[0].b)
        du = mine.new_empty(*mine.shape[:-1], self.targets * self.rank)
        for group in self.groups:
            outputs = _outputs(mine, group)
            (torch.mm if outputs.ndim == 2 else torch.bmm)(outputs, group.b, out=self._reduced(du, group))
        return du

    def gradients(self, dy: Tensor, x: Tensor, reduced: Tensor, du: Tensor) -> list[Tensor]:
        """Those of the leaves, from x, what `add` and `reduce_gradient` returned, and dy."""
        da = _scaled_product(du.mT, self.of(x), self.scale, like=self.a)
        mine = self.of(dy)
        db: list[Tensor] = []
        for group in self.groups:
            found = _scaled_product(_outputs(mine, group).mT, self._reduced(reduced, group), self.scale, like=group.b)
            db += [found] if group.targets == 1 else found.unbind()
        pairs = list(zip([da] if self.targets == 1 else da.split(self.rank, -2), db, strict=True))  # of each target
        if self.slices == 1:
            return [gradient for pair in pairs for gradient in pair]
        return [gradient[index] for index in range(self.slices) for pair in pairs for gradient in pair]

    def _reduced(self, reduced: Tensor, group: TargetGroup) -> Tensor:
        """A group's columns in x A^T or its gradient: [..., rank] of one target, [targets, tokens, rank] of several."""
        return _columns(reduced, group.first * self.rank, group.targets, self.rank)


def _outputs(row: Tensor, group: TargetGroup) -> Tensor:
    """The outputs of a group in a row [..., out]: [..., width] of one target, [targets, tokens, width] of several."""
    return _columns(row, group.start, group.targets, group.width)


def _columns(row: Tensor, start: int, count: int, width: int) -> Tensor:
    """`count` neighbouring stretches of columns, a view: [..., width] of one, [count, tokens, width] of several."""
    if count > 1:  # a single slice
        tokens, step = row.stride()
        return row.as_strided(
            (count, row.shape[0], width), (width * step, tokens, step), row.storage_offset() + start * step
        )
    return row if row.shape[-1] == width else row.narrow(-1, start, width)


@torch.no_grad()  # the leaves get their gradients from `_Projected`
def parts_of(linear: JoinedLinear, segments: Sequence[Segment]) -> list[Part]:
    """The parts of the row whose adapters cover the layer or some of it."""
    neighbours: list[list[tuple[Segment, Adapter, StackedMatrices]]] = []
    for segment in segments:
        adapter = segment.adapter
        stacked = None if adapter is None else adapter.stacked(linear.projection)
        if adapter is None or stacked is None:
            continue
        own = segment, adapter, stacked
        if neighbours and _continues(neighbours[-1][-1], own):
            neighbours[-1].append(own)
        else:
            neighbours.append([own])
    return [_part(own) for own in neighbours]


def _continues(one: tuple[Segment, Adapter, StackedMatrices], other: tuple[Segment, Adapter, StackedMatrices]) -> bool:
    """Whether `other` lies behind `one` and can be computed with it."""
    (first, adapter, stacked), (second, other_adapter, other_stacked) = one, other
    return (
        first.end == second.start
        and first.end - first.start == second.end - second.start
        and adapter.shape.rank == other_adapter.shape.rank
        and stacked.names == other_stacked.names
    )


def _part(own: Sequence[tuple[Segment, Adapter, StackedMatrices]]) -> Part:
    segment, adapter, stacked = own[0]
    rank, targets, a, groups, leaves = adapter.shape.rank, len(stacked.names), stacked.a, stacked.groups, stacked.leaves
    if len(own) > 1:
        a = torch.stack([matrices.a for _, _, matrices in own])
        b = [torch.stack([matrices.leaves[2 * number + 1] for _, _, matrices in own]) for number in range(targets)]
        alone = (
            (group.start + index * group.width, group.width, group.first + index)
            for group in groups
            for index in range(group.targets)
        )
        groups = tuple(TargetGroup(start, width, number, 1, b[number]) for start, width, number in alone)
        leaves = tuple(chain.from_iterable(matrices.leaves for _, _, matrices in own))
    return Part(segment.start, len(own), segment.end - segment.start, rank, adapter.scale, targets, a, groups, leaves)


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add scale · left @ right to `total`, in one operation: matrices, or stacks of them."""
    (total.addmm_ if total.ndim == 2 else total.baddbmm_)(left, right, alpha=scale)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The product of matrices, or of stacks of them, in two thirds of the time of the operator."""
    return torch.bmm(left, right) if left.ndim == 3 else torch.mm(left, right)


def _scaled_product(left: Tensor, right: Tensor, scale: float, like: Tensor) -> Tensor:
    """The product times scale, of the shape of `like`, which is not read."""
    return (torch.addmm if like.ndim == 2 else torch.baddbmm)(like, left, right, beta=0, alpha=scale)


class _Projected(torch.autograd.Function):
    """Takes the inputs of `before`, then weight and bias of each piece, then the leaves of each part."""

    @staticmethod
    def forward(
        ctx: Any, linear: JoinedLinear, before: Before, parts: list[Part], count: int, *tensors: Tensor | None
    ) -> Any:
        ctx.set_materialize_grads(False)
        h, others, kept = before.forward(*tensors[:count])
        y = linear.multiply(h)
        ctx.linear, ctx.before, ctx.parts, ctx.count, ctx.kept = linear, before, parts, count, len(kept)
        ctx.save_for_backward(*kept, *(part.add(y, h) for part in parts))
        return y, *others

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        linear, before, parts, count = ctx.linear, ctx.before, ctx.parts, ctx.count
        saved = ctx.saved_tensors  # asked for once: a layer that is recomputed gives them once
        kept, reduced = saved[: ctx.kept], saved[ctx.kept :]
        needed = ctx.needs_input_grad[4:]
        dy, *d_others = grads
        if dy is None:  # nothing uses the layer's output
            dy = linear.pieces[0].weight.new_zeros(_rows(kept), linear.projection.out_features)
        dh = _times_weights(dy, linear)
        reduced_gradients = [part.reduce_gradient(dy) for part in parts]
        for part, du in zip(parts, reduced_gradients, strict=True):
            _add_product(part.of(dh), du, part.a, part.scale)
        d_inputs, h = before.backward(kept, dh, d_others, needed[:count])
        found: list[Tensor | None] = []
        for index, ((start, end), _, _) in enumerate(linear.pieces):
            wants_weight, wants_bias = needed[count + 2 * index : count + 2 * index + 2]
            if not (wants_weight or wants_bias):
                found += (None, None)
                continue
            mine = dy.narrow(1, start, end - start)
            found += (mine.t() @ h if wants_weight else None, mine.sum(0) if wants_bias else None)
        for part, u, du in zip(parts, reduced, reduced_gradients, strict=True):
            found += part.gradients(dy, h, u, du)
        return None, None, None, None, *d_inputs, *found


def _rows(kept: Sequence[Tensor | None]) -> int:
    return next(len(tensor) for tensor in kept if tensor is not None)


def _times_weights(dy: Tensor, linear: JoinedLinear) -> Tensor:
    """The gradient of the input [tokens, in] through the base's weights alone; dy [tokens, out]."""
    first, *rest = linear.pieces
    if not rest:
        return torch.mm(dy, first.weight)
    dh = dy[:, : first.rows[1]] @ first.weight
    for (start, end), weight, _ in rest:
        dh.addmm_(dy[:, start:end], weight)
    return dh
