"""Products of sorted rows with one matrix for each group of them: what a mixture of experts consists of.

A group may have no row. `ends` [groups] int32 says behind which row each group ends. In half precision on a GPU widths
are multiples of 8, and the host waits for nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from tinsmith.kernels.dispatch import half_on_gpu


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows x [rows, in] with the transpose of their group's matrix, weight [groups, out, in]: [rows, out]."""
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    y = x.new_zeros(len(x), weight.shape[1])
    for group, rows in _rows_of(ends, len(x)):
        if isinstance(rows, slice):
            torch.mm(x[rows], weight[group].t(), out=y[rows])
        else:
            y = torch.where(rows, x @ weight[group].t(), y)
    return y


def transposed_product(y: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows y [rows, out] with their group's matrix, weight [groups, out, in]: [rows, in]."""
    return grouped_product(y, weight.transpose(1, 2), ends)


def outer_product(y: Tensor, x: Tensor, like: Tensor, ends: Tensor) -> Tensor:
    """Add up y ⊗ x of each group's rows, y [rows, out] and x [rows, in]: [groups, out, in], in the dtype of `like`."""
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(y.contiguous().t(), x.contiguous(), offs=ends)
    found = torch.zeros_like(like)
    for group, rows in _rows_of(ends, len(x)):
        if isinstance(rows, slice):
            torch.mm(y[rows].t(), x[rows], out=found[group])
        else:
            found[group] = torch.where(rows, y, 0).t() @ torch.where(rows, x, 0)
    return found


def _rows_of(ends: Tensor, count: int) -> Iterator[tuple[int, slice | Tensor]]:
    """Yield each group that has rows, and these: a slice on a CPU, and elsewhere, where the host knows none, a mask."""
    if ends.device.type == "cpu":
        start = 0
        for group, end in enumerate(ends.tolist()):
            if end > start:
                yield group, slice(start, end)
            start = end
        return
    place, first = torch.arange(count, device=ends.device, dtype=ends.dtype), ends.new_zeros(())
    for group, last in enumerate(ends.unbind()):
        yield group, ((place >= first) & (place < last)).unsqueeze(1)
        first = last
