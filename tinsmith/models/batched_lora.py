"""Linear layers of a decode batch: rows of one token with an adapter each, or none, served by one multiplication.

Each projection has one buffer for the A's of all adapters of a batch, and one for their B's: an adapter of rank r has r
neighbouring columns, the same in all projections. All rows are multiplied by the whole buffer, and each row keeps the
products of its own columns:

    u = x A^T,     u[row, column] = 0 where the column is not the row's,     y += 32 / rank · u B^T

They are selected, not multiplied by 0, and adapters whose numbers are not finite get no columns: so no NaN reaches the
row of another. The columns of a row are read on the device, so that a captured CUDA graph computes with what the
buffers hold at replay. Once they grow, they move, and the graph is stale.

A batch of one row takes the time of reading the weights. On a GPU in half precision our kernel (`kernels/one_row.py`)
reads them faster than a library's matrix product, and computes the norm before a layer too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.errors import UserError
from tinsmith.kernels.dispatch import on_kernels
from tinsmith.models.experts import ExpertStack, mix_bare, pairs_of
from tinsmith.models.fused import Before, Normed, swiglu
from tinsmith.models.grouped_product import grouped_product
from tinsmith.models.joined_linear import JoinedLinear
from tinsmith.models.layout import Layout, Projection
from tinsmith.models.lora import LORA_ALPHA, Adapter, experts_of
from tinsmith.models.packed_lora import Adapters

FEWEST = 32
"""Columns of the smallest buffers; larger ones have twice as many as the last."""
OUTPUTS = 128
"""Outputs of a tile, at most."""
MOST_COLUMNS = 512
"""Ranks of adapters that are decoded together, in all: eight adapters of rank 64. More run apart."""
EXPERT_BYTES = 2**31
"""Memory of columns of experts, at most: one takes some 30 MB in a model of 30 B parameters."""


def most_columns(layout: Layout, dtype: torch.dtype) -> int:
    """The most columns of a batch: `MOST_COLUMNS`, or what `EXPERT_BYTES` hold of experts', but at least `FEWEST`."""
    of_each = layout.expert_widths * dtype.itemsize
    fitting = EXPERT_BYTES // of_each if of_each else MOST_COLUMNS
    return min(MOST_COLUMNS, max(FEWEST, 1 << max(0, fitting.bit_length() - 1)))


@dataclass(frozen=True, eq=False)
class Matrices:
    """The matrices of all adapters of a batch for one projection."""

    rows: Mapping[str, tuple[int, int]]
    """Its targets, and the outputs [start, end) that each adds to."""
    a: Tensor
    """[targets, columns, in]"""
    b: Tensor
    """[out, columns]"""
    tiles: Tensor
    """[tiles, 3] of `output_tiles`."""

    def places(self, start: int, end: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each target's name, and views of these columns: A [end - start, in], B [out, end - start]."""
        for (name, (first, last)), a in zip(self.rows.items(), self.a, strict=True):
            yield name, a[start:end], self.b[first:last, start:end]


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """The matrices of all adapters of a batch for one mixture of experts."""

    a: Tensor
    """[2, columns, hidden] of gate and up"""
    b: Tensor
    """[experts, 2 · width, columns] of gate and up, one below the other"""
    inner: Tensor
    """[experts, columns, width]: the A's of down"""
    outer: Tensor
    """[hidden, columns]: the B of down"""
    tiles: Tensor
    """[tiles, 3] of `output_tiles`, of `outer`."""

    def places(self, start: int, end: int) -> tuple[Tensor, ...]:
        """Views of these columns: A and B of gate, of up and of down, as `ExpertFactors` has them."""
        (gate, up), (of_gate, of_up) = self.a[:, start:end], self.b[:, :, start:end].chunk(2, 1)
        return gate, of_gate, up, of_up, self.inner[:, start:end], self.outer[:, start:end]

    def copy_from(self, old: "ExpertMatrices", columns: int) -> None:
        """Copy the first columns of smaller buffers."""
        for own, theirs in zip(self.places(0, columns), old.places(0, columns), strict=True):
            own.copy_(theirs)


class BatchedAdapters:
    """The columns of the adapters of a batch, for all projections and mixtures of experts of a model."""

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype, most: int) -> None:
        """Begins without columns; there are never more than the least power of two that is `most` or more.

        `most_columns` says how many there should be.
        """
        self.projections = [projection for projection in layout.projections.values() if projection.targets]
        self.targets = layout.targets
        self.mixtures = [f"layers.{index}.mlp.experts" for index in layout.experts]
        self.device = device
        self.dtype = dtype
        self.most = most
        self.columns = 0
        self.generation = 0
        """Number of times the buffers were replaced: graphs captured with another number are stale."""
        self.matrices: dict[str, Matrices] = {}
        self.experts: dict[str, ExpertMatrices] = {}
        self._placed: dict[int, tuple[Adapter, int, int]] = {}
        """Adapters and their columns [start, end), by identity."""

    def place(self, adapter: Adapter) -> tuple[int, int] | None:
        """The columns [start, end) of an adapter, which gets some if it has none; None if there is no room for it.

        The buffers may be replaced by larger ones; columns stay where they are. Raises UserError for an adapter with a
        number that is not finite, which would reach other rows; to find out, this waits for the device.
        """
        if id(adapter) in self._placed:
            return self._placed[id(adapter)][1:]
        if not torch.isfinite(adapter.flat_working).all():
            name = "an adapter" if adapter.ref is None else adapter.ref.label
            raise UserError(
                f"{name} cannot be sampled from: some of its weights are NaN or infinite; load an earlier checkpoint"
            )
        rank = adapter.shape.rank
        free = self._gap(rank)
        if free is None:
            return None
        self._grow(free + rank)
        self._write(adapter, free)
        self._placed[id(adapter)] = adapter, free, free + rank
        return free, free + rank

    def forget(self, adapter: Adapter) -> None:
        """Give its columns to others; it may have none."""
        self._placed.pop(id(adapter), None)

    def for_rows(self, columns: Tensor) -> "RowAdapters":
        """The adapters of rows with these columns [start, end), [rows, 2]. Equal numbers mean the base."""
        return RowAdapters(self, columns)

    def _gap(self, rank: int) -> int | None:
        start = 0
        for _, first, last in sorted(self._placed.values(), key=lambda placed: placed[1]):
            if first - start >= rank:
                break
            start = last
        return start if start + rank <= max(self.columns, self.most) else None

    def _grow(self, columns: int) -> None:
        """Replace the buffers if they are too small; what lies in them is copied."""
        if columns <= self.columns:
            return
        wanted = max(FEWEST, 1 << (columns - 1).bit_length())
        # All are made before one is replaced: where memory runs out, captured graphs go on reading what is there.
        grown = {projection.name: self._matrices(projection, wanted) for projection in self.projections}
        experts = {name: self._expert_matrices(name, wanted) for name in self.mixtures}
        for name, old in self.matrices.items():
            grown[name].a[:, : self.columns].copy_(old.a)
            grown[name].b[:, : self.columns].copy_(old.b)
        for name, smaller in self.experts.items():
            experts[name].copy_from(smaller, self.columns)
        self.matrices, self.experts, self.columns = grown, experts, wanted
        self.generation += 1

    def _matrices(self, projection: Projection, columns: int) -> Matrices:
        a = torch.zeros(len(projection.targets), columns, projection.in_features, dtype=self.dtype, device=self.device)
        b = torch.zeros(projection.out_features, columns, dtype=self.dtype, device=self.device)
        return Matrices(projection.targets, a, b, output_tiles(list(projection.targets.values()), self.device))

    def _expert_matrices(self, name: str, columns: int) -> ExpertMatrices:
        gate, down = self.targets[f"{name}.gate_proj"], self.targets[f"{name}.down_proj"]
        shapes = (
            (2, columns, gate.in_features),
            (gate.experts, 2 * gate.out_features, columns),
            (down.experts, columns, down.in_features),
            (down.out_features, columns),
        )
        a, b, inner, outer = (torch.zeros(shape, dtype=self.dtype, device=self.device) for shape in shapes)
        return ExpertMatrices(a, b, inner, outer, output_tiles([(0, down.out_features)], self.device))

    @torch.no_grad()
    def _write(self, adapter: Adapter, start: int) -> None:
        """Copy the matrices of an adapter to its columns; zeros where it covers nothing."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for matrices in self.matrices.values():
            for name, a, b in matrices.places(start, start + adapter.shape.rank):
                pair = adapter.working.get(name)
                if pair is None:
                    a.zero_()
                    b.zero_()
                else:
                    targets += (a, b)
                    sources += pair
        for name, mixture in self.experts.items():
            places, factors = mixture.places(start, start + adapter.shape.rank), experts_of(adapter, name)
            if factors is None:
                torch._foreach_zero_(places)
            else:
                targets += places
                sources += [matrix for pair in factors for matrix in pair]
        torch._foreach_copy_(targets, sources)


class RowAdapters(Adapters):
    """The `Adapters` of the rows of one step; the same object serves all layers."""

    def __init__(self, batched: BatchedAdapters, columns: Tensor) -> None:
        self.matrices = batched.matrices
        self.experts = batched.experts
        self.columns = columns
        some = next(iter(self.matrices.values()), None)
        self._uses_kernels = some is not None and on_kernels("lora", some.a)
        if some is not None and not self._uses_kernels:
            column = torch.arange(batched.columns, device=columns.device)
            start, end = columns.unsqueeze(-1).unbind(1)  # [rows, 1] each
            self._own = (column >= start) & (column < end)  # [rows, columns]
            self._scale = (LORA_ALPHA / (end - start).clamp(min=1)).to(batched.dtype)

    def apply(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        """The layer with each row's adapter: x [rows, in] -> [rows, out]."""
        y = multiply(linear, x)
        matrices = self.matrices.get(linear.projection.name)
        if matrices is None:
            return y
        if self._uses_kernels:
            from tinsmith.kernels.lora import add_adapters

            add_adapters(y, x, self.columns, matrices.a, matrices.b, matrices.tiles, OUTPUTS, LORA_ALPHA)
        else:
            self._add(y, x, matrices)
        return y

    def route(self, stack: ExpertStack, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return route_rows(stack, h, choose)

    def mix(self, stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        matrices = self.experts.get(stack.name)
        if matrices is None:
            return mix_rows(stack, h, weights, chosen)
        if self._uses_kernels:
            from tinsmith.kernels import experts

            own = (self.columns, matrices.a, matrices.b, matrices.inner, matrices.outer, matrices.tiles)
            adapters = experts.RowMatrices(*own, OUTPUTS, LORA_ALPHA)
            return experts.mix(h, weights, chosen, stack.gate_up, stack.down, adapters)
        pairs = pairs_of(stack.kind, chosen, None, 1)
        of_pairs = pairs.weights(weights)
        inner = grouped_product(pairs.copied(h), stack.gate_up, pairs.ends)  # [pairs, 2 · width]
        for part, b, a in zip(inner.chunk(2, 1), matrices.b.chunk(2, 1), matrices.a, strict=True):
            part += grouped_product(pairs.copied(self._own_of(h @ a.t())), b, pairs.ends)
        activated = swiglu(inner)
        out = pairs.summed(grouped_product(activated, stack.down, pairs.ends) * of_pairs)
        inside = pairs.summed(grouped_product(activated, matrices.inner, pairs.ends) * of_pairs)
        return out.addmm_(self._own_of(inside), matrices.outer.t())

    def _own_of(self, reduced: Tensor) -> Tensor:
        """Keep of each row [rows, columns] its own columns, times their scale."""
        return torch.where(self._own, reduced, 0) * self._scale

    def _add(self, y: Tensor, x: Tensor, matrices: Matrices) -> None:
        reduced = (x @ matrices.a.flatten(0, 1).t()).unflatten(1, matrices.a.shape[:2])  # [rows, targets, columns]
        reduced = torch.where(self._own.unsqueeze(1), reduced, 0)
        for (first, last), u in zip(matrices.rows.values(), reduced.unbind(1), strict=True):
            y[:, first:last].addcmul_(u @ matrices.b[first:last].t(), self._scale)


def output_tiles(targets: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Cut targets into tiles [tiles, 3] int32: index of the target, and at most `OUTPUTS` outputs [start, end)."""
    tiles = [
        (number, first, min(first + OUTPUTS, end))
        for number, (start, end) in enumerate(targets)
        for first in range(start, end, OUTPUTS)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device)


def is_one_row(x: Tensor) -> bool:
    """Whether the kernel serves x [rows, in]."""
    return len(x) == 1 and on_kernels("one_row", x)


def multiply(linear: JoinedLinear, x: Tensor) -> Tensor:
    """The layer of a base model, whose weights do not change, without adapters: x [rows, in] -> [rows, out]."""
    if not is_one_row(x):
        return linear.multiply(x)
    from tinsmith.kernels import one_row

    return one_row.multiply(x, linear.weight, linear.bias)


def route_rows(stack: ExpertStack, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Choose the experts of rows h [rows, hidden] of a step as `ExpertStack.route` does; without gradients."""
    if not on_kernels("experts", h):
        return stack.route(h, choose)
    from tinsmith.kernels import experts

    logits = torch.nn.functional.linear(h, stack.router)
    weights, chosen = experts.choose(logits, stack.kind.per_token, stack.kind.normalized)
    followed = choose(chosen)
    return (weights, chosen) if followed is chosen else stack.route(h, lambda _: followed)


def mix_rows(stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Compute the experts of rows h [rows, hidden] of a step, which have no adapters; without gradients."""
    if not on_kernels("experts", h):
        return mix_bare(stack, h, weights, chosen)
    from tinsmith.kernels import experts

    return experts.mix(h, weights, chosen, stack.gate_up, stack.down, None)


class BareRows(Adapters):
    """The `Adapters` of rows that have none; without gradients."""

    def apply(self, linear: JoinedLinear, x: Tensor) -> Tensor:
        return multiply(linear, x)

    def route(self, stack: ExpertStack, h: Tensor, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        return route_rows(stack, h, choose)

    def mix(self, stack: ExpertStack, h: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return mix_rows(stack, h, weights, chosen)

    def project(self, linear: JoinedLinear, before: Before, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        x, *others = inputs
        if not isinstance(before, Normed) or x is None or not is_one_row(x):
            return super().project(linear, before, *inputs)
        from tinsmith.kernels import one_row

        delta, factor = others
        assert factor is not None
        return one_row.multiply_norm(x, delta, factor, linear.weight, linear.bias, before.eps, before.zero_centred)
