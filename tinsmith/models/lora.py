"""LoRA adapters: the effective weight is W + (32 / rank) · B · A (Hu et al., 2021, "LoRA", with alpha fixed at 32).

A packed row is sorted by adapter, so each adapter owns one slice of it (a `Segment`). Slices are computed apart and
joined: nothing is masked by multiplication, so a NaN in one model cannot reach another.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from tinsmith.models.layout import Layout, Projection, side_by_side
from tinsmith.protocol.shapes import LoraShape, WeightsRef

LORA_ALPHA = 32.0
"""Fixed, independent of the rank: the scale of an adapter is 32 / rank."""


class LoraPair(NamedTuple):
    """The two matrices of one module, or of a layer of all experts of a mixture, of which all share one matrix."""

    a: Tensor
    """[rank, in_features]; [experts, rank, in_features] of `down_proj` of experts"""
    b: Tensor
    """[out_features, rank]; [experts, out_features, rank] of `gate_proj` and `up_proj` of experts"""


class ExpertFactors(NamedTuple):
    """An adapter's working matrices of a mixture of experts."""

    gate: LoraPair
    up: LoraPair
    down: LoraPair

    @property
    def rank(self) -> int:
        return len(self.gate.a)

    def own(self, number: int) -> Tensor:
        """The matrices that each expert has of its own, of gate (0), up (1) or down (2): [experts, ...]."""
        return self.down.a if number == 2 else self[number].b


class TargetGroup(NamedTuple):
    """Neighbouring targets of a projection with equally many outputs, which one multiplication computes."""

    start: int
    """Its first output."""
    width: int
    """Outputs of each target."""
    first: int
    """The number of its first target among those that the adapter covers."""
    targets: int
    b: Tensor
    """[width, rank] of one target, [targets, width, rank] of several."""


class StackedMatrices(NamedTuple):
    """The working matrices of what an adapter covers of a projection."""

    names: tuple[str, ...]
    """The targets, in the order of their rows."""
    a: Tensor
    """Their A's, one below the other: [targets · rank, in]."""
    groups: tuple[TargetGroup, ...]
    leaves: tuple[Tensor, ...]
    """A and B of each target: what gradients are taken of."""


@dataclass(frozen=True)
class AdapterForm:
    """Names and shapes of an adapter's matrices, and their order in a buffer of all of them."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    """Of a, b, a, b and so on."""

    @cached_property
    def order(self) -> list[int]:
        """The order of matrices in the buffer: the A's of a projection, in the order of its rows, then their B's."""
        return _order_in_memory(self.names)

    def cut(self, flat: Tensor) -> list[Tensor]:
        """Views of a buffer, in the order and shapes of the matrices."""
        found = dict(zip(self.order, flat.split([self.shapes[place].numel() for place in self.order]), strict=True))
        return [found[place].view(shape) for place, shape in enumerate(self.shapes)]

    def pairs(self, flat: Tensor) -> dict[str, LoraPair]:
        """The same by module."""
        tensors = self.cut(flat)
        return {name: LoraPair(a, b) for name, a, b in zip(self.names, tensors[::2], tensors[1::2], strict=True)}

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """The same as MODULE.a and MODULE.b."""
        names = [f"{name}.{part}" for name in self.names for part in LoraPair._fields]
        return dict(zip(names, self.cut(flat), strict=True))


@dataclass(eq=False, repr=False)
class Adapter:
    """One set of LoRA matrices, in training or frozen: float32 `masters`, and `working` copies that passes read.

    The copies have the base's dtype. All masters are views of one buffer, and all copies of another, so that a step, a
    refresh and a snapshot are a few operations, however many layers there are. In float32 both are the same buffer.
    After `masters` changed, call `refresh`.
    """

    shape: LoraShape
    dtype: torch.dtype
    form: AdapterForm
    flat: Tensor
    """[parameter_count] the masters, in the order of `form`."""
    ref: WeightsRef | None = None
    """The identity of weights that are sampled; None for weights that train."""
    flat_working: Tensor = field(init=False)
    """[parameter_count] the working copies, in the same order."""
    scale: float = field(init=False)
    """Factor of B·A."""
    _stacks: dict[str, StackedMatrices | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.flat_working = self.flat.to(self.dtype)
        self.scale = LORA_ALPHA / self.shape.rank

    @cached_property
    def masters(self) -> dict[str, LoraPair]:
        """The float32 matrices of each module: views of `flat`."""
        return self.form.pairs(self.flat)

    @cached_property
    def working(self) -> dict[str, LoraPair]:
        """The matrices of each module in the base's dtype, of which gradients are taken: views of `flat_working`."""
        pairs = self.form.pairs(self.flat_working)
        for pair in pairs.values():
            pair.a.requires_grad_()
            pair.b.requires_grad_()
        return pairs

    def stacked(self, projection: Projection) -> StackedMatrices | None:
        """Its working matrices for a projection, as views that are made once; None if it covers nothing of it."""
        if projection.name not in self._stacks:
            names = tuple(name for name in projection.targets if name in self.working)
            self._stacks[projection.name] = _stack(self, projection, names) if names else None
        return self._stacks[projection.name]

    def refresh(self) -> None:
        """Make the working copies equal to the masters again."""
        if self.flat_working.dtype != self.flat.dtype:
            self.flat_working.copy_(self.flat)

    def snapshot(self, ref: WeightsRef) -> "Adapter":
        """A frozen copy that later training does not change. `ref` becomes its identity."""
        return replace(self, flat=self.flat.clone(), ref=ref)

    def under(self, ref: WeightsRef) -> "Adapter":
        """The same matrices, in the same memory, under another identity: for one that is frozen."""
        other = copy(self)
        other.ref = ref
        return other

    def tensors(self) -> list[Tensor]:
        """All masters in a fixed order: a and b of each module."""
        return [tensor for pair in self.masters.values() for tensor in pair]

    def named_tensors(self) -> dict[str, Tensor]:
        """All masters in the order of `tensors`, as MODULE.a and MODULE.b."""
        return self.form.named(self.flat)

    def leaves(self) -> list[Tensor]:
        """All working copies, in the order of `tensors`."""
        return [tensor for pair in self.working.values() for tensor in pair]

    def compared(self) -> list[Tensor]:
        """Tensors by which two adapters are told apart: the masters."""
        return [self.flat]

    def buffers(self) -> list[Tensor]:
        """Tensors that an optimizer updates: all masters in one."""
        return [self.flat]

    def cut(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Views, in the order and shapes of `tensors`, of something laid out like `buffers`, such as gradients."""
        return self.form.cut(buffers[0])

    def joined(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The inverse of `cut`, as a copy in the precision of `tensors`; None stands for zeros."""
        zeros, form = self.flat_working.new_zeros, self.form
        pieces = [zeros(form.shapes[place]) if (found := tensors[place]) is None else found for place in form.order]
        return [_flatten_dense_tensors(pieces)]  # in one call: a GPU would wait for hundreds

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return self.flat.nbytes + (self.flat_working.nbytes if self.flat_working.dtype != self.flat.dtype else 0)

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return self.flat.numel()


def experts_of(adapter: Adapter, name: str) -> ExpertFactors | None:
    """The working matrices of an adapter for the mixture of experts of this name; None if it covers nothing of it."""
    found = [adapter.working.get(f"{name}.{part}_proj") for part in ("gate", "up", "down")]
    gate, up, down = found
    if gate is None or up is None or down is None:
        if any(pair is not None for pair in found):
            raise ValueError(f"an adapter covers only some of gate, up and down of {name}")
        return None
    return ExpertFactors(gate, up, down)


@torch.no_grad()
def _stack(adapter: Adapter, projection: Projection, names: tuple[str, ...]) -> StackedMatrices:
    def neighbours(first: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A view of this shape of the working copies that begins where `first` does."""
        start = first.storage_offset()
        return adapter.flat_working[start : start + math.prod(shape)].view(shape)

    pairs = [adapter.working[name] for name in names]
    rank = len(pairs[0].a)
    groups: list[TargetGroup] = []
    for number, (name, pair) in enumerate(zip(names, pairs, strict=True)):
        start, end = projection.targets[name]
        before = groups[-1] if groups else None
        if before and before.width == end - start and before.start + before.targets * before.width == start:
            targets = before.targets + 1
            groups[-1] = before._replace(
                targets=targets, b=neighbours(pairs[before.first].b, (targets, before.width, rank))
            )
        else:
            groups.append(TargetGroup(start, end - start, number, 1, pair.b.detach()))
    a = neighbours(pairs[0].a, (len(names) * rank, projection.in_features))
    return StackedMatrices(names, a, tuple(groups), tuple(leaf for pair in pairs for leaf in pair))


@lru_cache(maxsize=64)
def _order_in_memory(names: tuple[str, ...]) -> list[int]:
    """Return the order of `Adapter.tensors` in its buffer."""
    places = {name: 2 * number for number, name in enumerate(names)}  # of A; B is the next
    return [places[name] + part for group in side_by_side(names) for part in (0, 1) for name in group]


def adapter_of(
    shape: LoraShape,
    masters: Mapping[str, LoraPair],
    dtype: torch.dtype,
    ref: WeightsRef | None = None,
    device: torch.device | None = None,
) -> Adapter:
    """An adapter of copies of these matrices by module, on `device` if one is given."""
    given = [tensor for pair in masters.values() for tensor in pair]
    form = AdapterForm(tuple(masters), tuple(tensor.shape for tensor in given))
    return Adapter(
        shape, dtype, form, torch.cat([given[place].detach().flatten() for place in form.order]).to(device), ref
    )


def new_adapter(shape: LoraShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> Adapter:
    """A fresh adapter on a base of this layout: A uniform as torch.nn.Linear's default, B zero.

    The draws come from a CPU generator in the order of the layout, so one seed gives the same adapter on every device.
    """
    generator = torch.Generator("cpu").manual_seed(shape.seed)
    covered = layout.covered(shape)
    sizes = [torch.Size(size) for target in covered.values() for size in target.shapes(shape.rank)]
    counts = [size.numel() for size in sizes]
    form = AdapterForm(tuple(covered), tuple(sizes))
    drawn = torch.empty(sum(counts[::2]))  # all A's, which travel to the device at once
    for target, a in zip(covered.values(), drawn.split(counts[::2]), strict=True):
        bound = 1 / math.sqrt(target.in_features)
        a.uniform_(-bound, bound, generator=generator)
    flat = torch.zeros(sum(counts), device=device)
    places = [a.flatten() for a in form.cut(flat)[::2]]  # views
    torch._foreach_copy_(places, drawn.to(device).split(counts[::2]))
    return Adapter(shape, dtype, form, flat)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a packed row that belong to one adapter; None means the bare base."""

    start: int
    end: int
    adapter: Adapter | None
