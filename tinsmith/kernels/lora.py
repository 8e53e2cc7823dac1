"""Triton kernels for LoRA in a decode batch (`models/batched_lora.py`): two launches for a projection.

Rows may have any adapters. A row's columns are read on the device, and matrices that no row of a tile needs are not
read: buffers for many adapters cost no more than small ones. The sizes of a projection are arguments, not constants, so
that all projections share what is compiled.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.kernels.dispatch import overlapping, with_plain_rows

CHUNK = 32
"""Columns that a program computes at a time; buffers have a multiple of it."""
MOST_ROWS = 64
"""Rows of a program of the first kernel, at most."""
MOST_EXPANDED = 16
"""Rows of a program of the second, at most: with more it waits longer for what is reduced, and for what it adds to."""
STEP = 128
"""Inputs that the first kernel multiplies at a time."""
SHARE = 512
"""Inputs of a program of the first kernel, unless there would be more than `SPLITS` programs for one tile."""
SPLITS = 8
PARTS = 2
"""Programs of a tile of outputs, where tiles alone are not `ENOUGH` programs to fill a GPU."""
ENOUGH = 128


def add_adapters(
    y: Tensor, x: Tensor, columns: Tensor, a: Tensor, b: Tensor, tiles: Tensor, widest: int, alpha: float
) -> None:
    """Add to y [rows, out] what the adapters of the rows make of x [rows, in].

    `columns` [rows, 2] are those of each row, a [targets, columns, in], b [out, columns]; `tiles` come from
    `output_tiles`, and have at most `widest` outputs. The scale is `alpha` by the rank, the number of a row's columns.
    Nothing is read on the host.
    """
    expand(y, columns, b, reduce(with_plain_rows(x), columns, a), tiles, len(a), widest, alpha)


def reduce(x: Tensor, columns: Tensor, a: Tensor) -> Tensor:
    """X A^T in parts [splits, rows, targets · columns] float32 to be added up; of a row its own columns at least."""
    rows, inputs = x.shape
    width = a.shape[1]
    row_tile = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    share = max(SHARE, triton.cdiv(triton.cdiv(inputs, SPLITS), STEP) * STEP)
    splits = triton.cdiv(inputs, share)
    reduced = torch.empty(splits, rows, len(a) * width, dtype=torch.float32, device=x.device)
    launch: Any = _reduce
    launch[(len(a) * width // CHUNK, triton.cdiv(rows, row_tile), splits)](
        *(x, a, columns, reduced, rows, x.stride(0), columns.stride(0), inputs, width, len(a), share),
        ROWS=row_tile,
        CHUNK=CHUNK,
        STEP=STEP,
        num_warps=4,
        num_stages=3,
        **overlapping(x.device, rows),
    )
    return reduced


def expand(
    y: Tensor, columns: Tensor, b: Tensor, reduced: Tensor, tiles: Tensor, targets: int, widest: int, alpha: float
) -> None:
    """Add to y [rows, out] the sum of `reduced` [splits, rows, targets · columns] times B^T and the rows' scale."""
    rows, width = len(y), b.shape[1]
    row_tile = min(MOST_EXPANDED, max(16, triton.next_power_of_2(rows)))
    row_tiles = triton.cdiv(rows, row_tile)
    # Programs for whole tiles read less of what is reduced, but only many rows and outputs make enough of them.
    parts = 1 if len(tiles) * row_tiles >= ENOUGH else PARTS
    sizes = {
        "ALPHA": alpha,
        "SPLITS": len(reduced),
        "ROWS": row_tile,
        "CHUNK": CHUNK,
        "OUTPUTS": widest // parts,
        "PARTS": parts,
    }
    launch: Any = _expand
    launch[(len(tiles) * parts, row_tiles)](
        *(y, b, columns, reduced, tiles, rows, y.stride(0), columns.stride(0), width, targets),
        **sizes,
        num_warps=4,
        num_stages=2,
        **overlapping(y.device, rows),
    )


@triton.jit
def columns_of(columns: tl.tensor, row: tl.tensor, inside: tl.tensor, stride: tl.tensor) -> tl.tuple:
    """The columns [start, end) of the rows inside, and those that some of them has: from the first to the last."""
    start = tl.load(columns + row * stride, mask=inside, other=0).to(tl.int32)
    end = tl.load(columns + row * stride + 1, mask=inside, other=0).to(tl.int32)
    first = tl.min(tl.where(start < end, start, 2**30), 0)
    last = tl.max(tl.where(start < end, end, 0), 0)
    return start, end, first, last


@triton.jit(do_not_specialize=["rows", "targets"])
def _reduce(
    x: tl.tensor,
    a: tl.tensor,
    columns: tl.tensor,
    reduced: tl.tensor,
    rows: tl.tensor,
    x_stride: tl.tensor,
    columns_stride: tl.tensor,
    inputs: tl.tensor,
    width: tl.tensor,
    targets: tl.tensor,
    share: tl.tensor,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """X A^T of a tile of rows, one chunk of columns of one target, and a share of the inputs."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0) * CHUNK  # in all targets
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    start, end, _, _ = columns_of(columns, row, row < rows, columns_stride)
    column = chunk % width
    needed = tl.max(((start < end) & (start < column + CHUNK) & (end > column)).to(tl.int32), 0)
    if needed > 0:
        matrix_row = chunk + tl.arange(0, CHUNK)
        sums = tl.zeros([ROWS, CHUNK], tl.float32)
        for first in range(split * share, tl.minimum(split * share + share, inputs), STEP):
            place = first + tl.arange(0, STEP)
            own_x = tl.load(
                x + row[:, None] * x_stride + place[None, :],
                mask=(row < rows)[:, None] & (place < inputs)[None, :],
                other=0.0,
            )
            own_a = tl.load(
                a + matrix_row[:, None] * inputs + place[None, :], mask=(place < inputs)[None, :], other=0.0
            )
            sums = tl.dot(own_x, tl.trans(own_a), acc=sums)
        place = (split * rows + row[:, None]) * (targets * width) + matrix_row[None, :]
        tl.store(reduced + place, sums, mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows", "targets"])
def _expand(
    y: tl.tensor,
    b: tl.tensor,
    columns: tl.tensor,
    reduced: tl.tensor,
    tiles: tl.tensor,
    rows: tl.tensor,
    y_stride: tl.tensor,
    columns_stride: tl.tensor,
    width: tl.tensor,
    targets: tl.tensor,
    ALPHA: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Y += scale · u B^T of a tile of rows and part of a tile of outputs; u sums what the first kernel left."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(0) // PARTS * 3
    target = tl.load(tiles + tile)
    output = tl.load(tiles + tile + 1) + tl.program_id(0) % PARTS * OUTPUTS + tl.arange(0, OUTPUTS)
    last_output = tl.load(tiles + tile + 2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    start, end, first, last = columns_of(columns, row, row < rows, columns_stride)
    if first < last:
        inside = (row < rows)[:, None] & (output < last_output)[None, :]
        own_y = y + row[:, None].to(tl.int64) * y_stride + output[None, :]
        before = tl.load(own_y, mask=inside, other=0.0)
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for chunk in range(first // CHUNK * CHUNK, last, CHUNK):
            column = chunk + tl.arange(0, CHUNK)
            own = (column[None, :] >= start[:, None]) & (column[None, :] < end[:, None])
            u = tl.zeros([ROWS, CHUNK], tl.float32)
            for split in tl.static_range(SPLITS):
                place = (split * rows + row[:, None]) * (targets * width) + target * width + column[None, :]
                u += tl.load(reduced + place, mask=(row < rows)[:, None], other=0.0)
            u = tl.where(own, u, 0.0)  # elsewhere the first kernel may have left anything
            matrix = tl.load(
                b + output[:, None].to(tl.int64) * width + column[None, :],
                mask=(output < last_output)[:, None],
                other=0.0,
            )
            sums = tl.dot(u.to(b.dtype.element_ty), tl.trans(matrix), acc=sums)
        scale = ALPHA / tl.maximum(end - start, 1).to(tl.float32)
        tl.store(own_y, (before.to(tl.float32) + sums * scale[:, None]).to(y.dtype.element_ty), mask=inside)
