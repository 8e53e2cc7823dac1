"""The product of sorted rows with one matrix for each group of them: what a mixture of experts consists of."""

from collections.abc import Iterator
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
        # Rows that lie copied to their experts are the largest of what a layer could keep: only trained weights need them
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
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
    y = x.new_zeros(len(x), weight.shape[1])
    for group, rows in _rows_of(ends, len(x)):
        if isinstance(rows, slice):
            torch.mm(x[rows], weight[group].t(), out=y[rows])
        else:
            y = torch.where(rows, x @ weight[group].t(), y)
    return y


def _outer(dy: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute the gradient of the weights: dy [rows, out] and x [rows, in] -> [groups, out, in]."""
    if half_on_gpu(x.device, x.dtype):
        return grouped_mm(dy.contiguous().t(), x.contiguous(), offs=ends)
    found = torch.zeros_like(weight)
    for group, rows in _rows_of(ends, len(x)):
        if isinstance(rows, slice):
            torch.mm(dy[rows].t(), x[rows], out=found[group])
        else:
            found[group] = torch.where(rows, dy, 0).t() @ torch.where(rows, x, 0)
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
