"""Tensors laid end to end in a row of numbers, of which each of several workers has a part of one size.

The row need not lie in memory: what is asked for are stretches of it, which are copied from the tensors or into them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

ALIGNED = 64
"""Tensors begin at multiples of so many numbers: of 128 bytes in half precision, which all kernels take."""


@dataclass(frozen=True)
class FlatRow:
    """Positions of tensors in one flat row."""

    shapes: Mapping[str, torch.Size]
    """Shapes of the tensors by name, in order."""
    workers: int

    @cached_property
    def starts(self) -> list[int]:
        """First element of each tensor, and the end of the last one."""
        return [0, *accumulate(-(-shape.numel() // ALIGNED) * ALIGNED for shape in self.shapes.values())]

    @cached_property
    def part(self) -> int:
        """Numbers of each worker. The last ones of the row may belong to no tensor; they are 0."""
        unit = ALIGNED * self.workers
        return -(-self.starts[-1] // unit) * ALIGNED

    @property
    def numbers(self) -> int:
        """Number of elements without padding."""
        return sum(shape.numel() for shape in self.shapes.values())

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors, by name, in a row that lies in memory as a whole."""
        pairs = zip(self.shapes.items(), self.starts[:-1], strict=True)
        return {name: whole[start : start + shape.numel()].view(shape) for (name, shape), start in pairs}

    @torch.no_grad()
    def fill(self, stretch: Tensor, start: int, tensors: Sequence[Tensor | None]) -> None:
        """Copy the numbers of the row from `start` on into `stretch`, in its precision.

        None stands for a tensor of zeros. Contiguous tensors are copied without other memory.
        """
        stretch.zero_()
        for number, there, inside in self.within(start, len(stretch)):
            tensor = tensors[number]
            if tensor is not None:
                stretch[there].copy_(tensor.detach().reshape(-1)[inside])

    @torch.no_grad()
    def read(self, stretch: Tensor, start: int, tensors: Sequence[Tensor]) -> None:
        """Copy `stretch`, the numbers of the row from `start` on, into contiguous tensors of any precision."""
        for number, there, inside in self.within(start, len(stretch)):
            tensors[number].detach().view(-1)[inside].copy_(stretch[there])

    def within(self, start: int, count: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield each tensor in a stretch: its number, its slice of the stretch, and its own numbers that lie there."""
        for number, (shape, begins) in enumerate(zip(self.shapes.values(), self.starts[:-1], strict=True)):
            first, last = max(start, begins), min(start + count, begins + shape.numel())
            if first < last:
                yield number, slice(first - start, last - start), slice(first - begins, last - begins)
