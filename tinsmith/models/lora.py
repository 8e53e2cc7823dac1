"""LoRA: many adapters over one frozen base, in one pass.

The effective weight is W + (32 / rank) · B · A (Hu et al., 2021, "LoRA", with alpha fixed at 32). Master copies are float32 on every
device; passes compute in the base's dtype. A trainable adapter and a frozen snapshot of it are the same class, so trainer and sampler run
the same code.

A packed row is sorted by adapter, so each adapter owns one slice of it (a `Segment`). Slices are computed apart and joined: nothing is
masked by multiplication, so a NaN in one model cannot reach another.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith.models.layout import Layout
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef

LORA_ALPHA = 32.0
"""Fixed, independent of the rank: the scale of an adapter is 32 / rank."""


class LoraPair(NamedTuple):
    """The two matrices of one module."""

    a: Tensor
    """[rank, in_features]"""
    b: Tensor
    """[out_features, rank]"""


@dataclass
class Adapter:
    """One set of LoRA matrices. `masters` are float32; `working` are the copies in the base's dtype that passes read.

    In float32 the two are the same tensors. After `masters` changed, call `refresh`.
    """

    shape: LoraShape
    masters: dict[str, LoraPair]
    dtype: torch.dtype
    working: dict[str, LoraPair] = field(init=False)
    ref: WeightsRef | None = None
    """The identity of weights that are sampled from. None for weights that train, because training changes them."""

    def __post_init__(self) -> None:
        self.working = {name: LoraPair(*(t.detach().to(self.dtype).requires_grad_() for t in pair)) for name, pair in self.masters.items()}

    @property
    def scale(self) -> float:
        """What B·A is multiplied by."""
        return LORA_ALPHA / self.shape.rank

    def refresh(self) -> None:
        """Make the working copies equal to the masters again."""
        if self.dtype != torch.float32:
            with torch.no_grad():
                torch._foreach_copy_(self.leaves(), self.tensors())

    def snapshot(self, ref: WeightsRef) -> "Adapter":
        """A frozen copy that later training does not change. `ref` becomes its identity."""
        copies = {name: LoraPair(pair.a.clone(), pair.b.clone()) for name, pair in self.masters.items()}
        return Adapter(self.shape, copies, self.dtype, ref)

    def tensors(self) -> list[Tensor]:
        """All masters in a fixed order: a and b of each module."""
        return [tensor for pair in self.masters.values() for tensor in pair]

    def named_tensors(self) -> dict[str, Tensor]:
        """All masters in the order of `tensors`, as MODULE.a and MODULE.b."""
        return {f"{name}.{part}": tensor for name, pair in self.masters.items() for part, tensor in pair._asdict().items()}

    def leaves(self) -> list[Tensor]:
        """All working copies, in the order of `tensors`: what gradients are taken of."""
        return [tensor for pair in self.working.values() for tensor in pair]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        copies = self.leaves() if self.dtype != torch.float32 else []
        return sum(tensor.nbytes for tensor in (*self.tensors(), *copies))

    @property
    def parameter_count(self) -> int:
        """How many numbers the adapter trains."""
        return sum(tensor.numel() for tensor in self.tensors())


def new_adapter(shape: LoraShape, layout: Layout, device: torch.device, dtype: torch.dtype) -> Adapter:
    """A fresh adapter on a base of this layout: A uniform as torch.nn.Linear's default, B zero.

    The draws come from a CPU generator in the order of the layout, so one seed gives the same adapter on every device.
    """
    generator = torch.Generator("cpu").manual_seed(shape.seed)
    masters = {}
    for name, target in layout.covered(shape).items():
        bound = 1 / math.sqrt(target.in_features)
        a = torch.empty(shape.rank, target.in_features).uniform_(-bound, bound, generator=generator)
        masters[name] = LoraPair(a.to(device), torch.zeros(target.out_features, shape.rank, device=device))
    return Adapter(shape, masters, dtype)


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a packed row that belong to one adapter; None means the bare base."""

    start: int
    end: int
    adapter: Adapter | None


class ActiveSegments:
    """The segments of the pass that is running, for all LoRA modules of one base model. Between passes there are none.

    transformers calls a linear layer with its input alone, so that these cannot travel as an argument, as a `PassPlan` does.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    @contextmanager
    def during(self, segments: list[Segment]) -> Iterator[None]:
        """Set the segments while the body runs. Afterwards they are what they were: no adapter is kept alive by them."""
        before, self.segments = self.segments, segments
        try:
            yield
        finally:
            self.segments = before
