"""The product of sorted rows with one matrix for each group of them: what a mixture of experts consists of."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from tinsmith.kernels.dispatch import half_on_gpu


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows x [rows, in] with the transposed matrix of their group: [rows, out]. Differentiable.

    `weight` is [groups, out, in], and `ends` [groups] int32 says behind which row each group ends. A group may have no
    row. In half precision on a GPU `in` and `out` are multiples of 8, and the host waits for nothing.
    """
    compute: Any = _GroupedProduct.apply
    result: Tensor = compute(x, weight, ends)
    return result


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return _times(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        (dy,) = grads
        wants_x, wants_weight, _ = ctx.needs_input_grad
        dx = _times(dy, weight.transpose(1, 2), ends) if wants_x else None
        return dx, _outer(dy, x, weight, ends) if wants_weight else None, None


def _times(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute x [rows, in] times weight [groups, out, in], transposed: [rows, out]."""
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)
    return multiply_rows(x, weight, _rows_of(ends, len(x)))


def _outer(dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute the gradient of the weights: dy [rows, out] and x [rows, in] -> [groups, out, in]."""
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(dy.contiguous().t(), x.contiguous(), offs=ends)
    return multiply_groups(dy, x, weight, _rows_of(ends, len(x)))


# Group by group, where no kernel does all at once. Nothing of a row reaches another group, NaN neither.

Rows = Iterable[tuple[int, slice | Tensor]]
"""Groups, and the rows of each: a slice, or a mask [rows, 1]."""


def multiply_rows(x: Tensor, weight: Tensor, groups: Rows) -> Tensor:
    """Multiply rows x [rows, in] with the transposed matrix of their group in weight [groups, out, in]: [rows, out]."""
    y = x.new_zeros(len(x), weight.shape[1])
    for group, rows in groups:
        if isinstance(rows, slice):
            torch.mm(x[rows], weight[group].t(), out=y[rows])
        else:
            y = torch.where(rows, x @ weight[group].t(), y)
    return y


def multiply_groups(dy: Tensor, x: Tensor, like: Tensor, groups: Rows) -> Tensor:
    """Multiply dy [rows, out], transposed, with x [rows, in] in each group: [groups, out, in], shaped as `like`."""
    found = torch.zeros_like(like)
    for group, rows in groups:
        if isinstance(rows, slice):
            torch.mm(dy[rows].t(), x[rows], out=found[group])
        else:
            found[group] = torch.where(rows, dy, 0).t() @ torch.where(rows, x, 0)
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
