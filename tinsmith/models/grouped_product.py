"""Products of sorted rows with one matrix for each group of them: what a mixture of experts consists of.

`ends` [groups] int32 says behind which row each group ends; a group may have no row. In half precision on a GPU widths
are multiples of 8, there are at most `MOST_GROUPS`, and on Hopper and later the host waits for nothing. Nothing of a
row reaches another group, NaN neither. Quantized matrices are unpacked for each product anew: nobody keeps them.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from tinsmith.kernels.dispatch import half_on_gpu
from tinsmith.models.quantized import Matrices

MOST_GROUPS = 1023
"""Groups of one product: PyTorch's kernel for Hopper takes fewer than 1,024."""


def grouped_product(x: Tensor, weight: Matrices, ends: Tensor) -> Tensor:
    """Multiply rows x [rows, in] with the transpose of their group's matrix, weight [groups, out, in]: [rows, out]."""
    return _multiplied(x, _whole(weight, ends), ends)


def transposed_product(y: Tensor, weight: Matrices, ends: Tensor) -> Tensor:
    """Multiply rows y [rows, out] with their group's matrix, weight [groups, out, in]: [rows, in]."""
    return _multiplied(y, _whole(weight, ends).transpose(1, 2), ends)


def _whole(weight: Matrices, ends: Tensor) -> Tensor:
    """The matrices of the groups that have rows; what others read may be anything."""
    return weight if isinstance(weight, Tensor) else weight.unpacked(ends)


def _multiplied(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    return multiply_rows(x, weight, _rows_of(ends, len(x)))


def outer_product(y: Tensor, x: Tensor, like: Tensor, ends: Tensor) -> Tensor:
    """Add up y ⊗ x of each group's rows, y [rows, out] and x [rows, in]: [groups, out, in], shaped as `like`."""
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(y.contiguous().t(), x.contiguous(), offs=ends)
    return multiply_groups(y, x, like, _rows_of(ends, len(x)))


# Group by group, where no kernel does all at once.

Rows = Iterable[tuple[int, slice | Tensor]]
"""Groups, and the rows of each: a slice, or a mask [rows, 1]."""


def multiply_rows(x: Tensor, weight: Tensor, groups: Rows) -> Tensor:
    """Compute `grouped_product` of these groups."""
    y = x.new_zeros(len(x), weight.shape[1])
    for group, rows in groups:
        if isinstance(rows, slice):
            torch.mm(x[rows], weight[group].t(), out=y[rows])
        else:
            y = torch.where(rows, x @ weight[group].t(), y)
    return y


def multiply_groups(y: Tensor, x: Tensor, like: Tensor, groups: Rows) -> Tensor:
    """Compute `outer_product` of these groups."""
    found = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    for group, rows in groups:
        if isinstance(rows, slice):
            torch.mm(y[rows].t(), x[rows], out=found[group])
        else:
            found[group] = torch.where(rows, y, 0).t() @ torch.where(rows, x, 0)
    return found


def _rows_of(ends: Tensor, count: int) -> Rows:
    return slices(ends) if ends.device.type == "cpu" else masks(ends, count)


def slices(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each group that has rows, and these. Waits for the device of `ends`."""
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            yield group, slice(start, end)
        start = end


def masks(ends: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each group, and which of the `count` rows are its own: [rows, 1]. Waits for no device."""
    place, first = torch.arange(count, device=ends.device, dtype=ends.dtype), ends.new_zeros(())
    for group, last in enumerate(ends.unbind()):
        yield group, ((place >= first) & (place < last)).unsqueeze(1)
        first = last
