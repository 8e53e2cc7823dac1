"""The Triton kernel of a decode batch of one row (`models/batched_lora.py`): a matrix times the row or its norm.

All the time goes into reading the matrix once. So each program has many bytes of it under way: it asks for the next
tile before it computes with the last, and for the first before the kernels ahead have computed the row. Therefore
nothing may have written the matrix just before: see `overlapping` in `kernels/dispatch.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.kernels.dispatch import overlapping

OUTPUTS = 4
"""Outputs of a program."""
STEP = 1024
"""Numbers of each matrix row that a program has at a time; half where that divides a wide matrix better."""
NUMBERS = 32
"""Numbers of such a tile that each thread holds."""
WIDE = 2**14
"""Outputs of a wide matrix."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product [1, out] of x [1, in] and weight [out, in], and bias [out].

    The weight is a base model's, which does not change.
    """
    x = x.contiguous()
    return _launched(x, x, x, x, weight, bias, 0.0, zero_centred=False, norms=False, adds=False)


def multiply_norm(
    x: Tensor, delta: Tensor | None, factor: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """The RMS norm of x + delta [1, in] with weight `factor` [in], multiplied as by `multiply`; and the sum."""
    x = x.contiguous()
    if delta is None:
        return _launched(x, x, factor, x, weight, bias, eps, zero_centred, norms=True, adds=False), x
    total = torch.empty_like(x)
    return _launched(
        x, delta.contiguous(), factor, total, weight, bias, eps, zero_centred, norms=True, adds=True
    ), total


def _launched(
    x: Tensor,
    delta: Tensor,
    factor: Tensor,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    zero_centred: bool,
    norms: bool,
    adds: bool,
) -> Tensor:
    outputs, inputs = weight.shape
    if not weight.is_contiguous():
        raise ValueError(f"the weight has strides {weight.stride()}; make it contiguous")
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    step = STEP // 2 if outputs >= WIDE and inputs % STEP else STEP
    launch: Any = _multiply
    kind = {"NORMS": norms, "ADDS": adds, "ZERO_CENTRED": zero_centred, "HAS_BIAS": bias is not None}
    launch[(triton.cdiv(outputs, OUTPUTS),)](
        *(x, delta, factor, total, weight, weight if bias is None else bias, out, outputs, eps),
        INPUTS=inputs,
        PADDED=triton.next_power_of_2(inputs),
        OUTPUTS=OUTPUTS,
        STEP=step,
        EVEN=outputs % OUTPUTS == 0,
        **kind,
        num_warps=OUTPUTS * step // (32 * NUMBERS),
        **overlapping(x.device, 1),
    )
    return out


@triton.jit
def _tile(
    row: tl.tensor, column: tl.tensor, own: tl.tensor, INPUTS: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr
) -> tl.tensor:
    """Numbers of a matrix, which nobody reads again; zeros beyond its edges."""
    if EVEN and WHOLE:
        return tl.load(row + column[None, :], eviction_policy="evict_first")
    return tl.load(
        row + column[None, :], mask=own[:, None] & (column < INPUTS)[None, :], other=0.0, eviction_policy="evict_first"
    )


@triton.jit
def _row(
    x: tl.tensor, delta: tl.tensor, column: tl.tensor, out: tl.tensor, INPUTS: tl.constexpr, ADDS: tl.constexpr
) -> tl.tensor:
    """Some numbers of x, or of its sum with delta, rounded before the norm: the next layer adds to what is stored."""
    inside = column < INPUTS
    wide = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        wide = (
            (wide + tl.load(delta + column, mask=inside, other=0.0).to(tl.float32))
            .to(out.dtype.element_ty)
            .to(tl.float32)
        )
    return wide


@triton.jit
def _multiply(
    x: tl.tensor,
    delta: tl.tensor,
    factor: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    outputs: tl.tensor,
    eps: tl.tensor,
    INPUTS: tl.constexpr,
    PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    ADDS: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some outputs.

    The first program stores the sum of x and delta. What `_norm` in `kernels/rows.py` rounds is rounded here too.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = output < outputs
    row = weight + output[:, None].to(tl.int64) * INPUTS
    place = tl.arange(0, STEP)
    dtype = out.dtype.element_ty
    tile = _tile(row, place, own, INPUTS, EVEN, STEP <= INPUTS)
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    inverse = 1.0
    if NORMS:
        whole = tl.arange(0, PADDED)
        wide = _row(x, delta, whole, out, INPUTS, ADDS)
        tl.store(total + whole, wide.to(dtype), mask=(whole < INPUTS) & ADDS & (tl.program_id(0) == 0))
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / INPUTS + eps)
    sums = tl.zeros([OUTPUTS, STEP], tl.float32)
    for first in tl.static_range(0, INPUTS, STEP):
        column = first + place
        following = tile
        if first + STEP < INPUTS:
            following = _tile(row, column + STEP, own, INPUTS, EVEN, first + 2 * STEP <= INPUTS)
        h = _row(x, delta, column, out, INPUTS, ADDS)
        if NORMS:
            scale = tl.load(factor + column, mask=column < INPUTS, other=0.0).to(tl.float32) + ZERO_CENTRED
            h = (h * inverse * scale).to(dtype).to(tl.float32)
        sums += tile.to(tl.float32) * h[None, :]
        tile = following
    found = tl.sum(sums, 1)
    if HAS_BIAS:
        found += tl.load(bias + output, mask=own, other=0.0).to(tl.float32)
    tl.store(out + output, found.to(dtype), mask=own)
