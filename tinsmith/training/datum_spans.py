"""Maps the positions of a row to its datums, for losses that depend on other positions of the datum."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tinsmith.models.device import upload


class DatumSpans:
    """Datums of so many positions, one behind the other. Whatever their number, a sum over each is one operation.

    Datums are never told apart by a multiplication, so that a NaN stays in its own.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.device = device

    @cached_property
    def _counts(self) -> Tensor:
        """Return the lengths [datums]."""
        return upload(np.array(self.lengths, dtype=np.int64), self.device)

    def sums(self, values: Tensor) -> Tensor:
        """[datums] in the precision of `values` [positions], of which no gradient is taken. Added up in float64."""
        # "unsafe": lengths are not read back from a GPU to be checked.
        total = torch.segment_reduce(values.detach().double(), "sum", lengths=self._counts, unsafe=True)
        return total.to(values.dtype)

    def spread(self, of_each: Tensor) -> Tensor:
        """[positions] of which each has what its datum has in `of_each` [datums]."""
        return of_each.repeat_interleave(self._counts, output_size=sum(self.lengths))
