"""Triton code that reads quantized matrices of experts (`models/quantized.py`), and the kernel that unpacks them.

A decoding step reads them where it multiplies (`kernels/experts.py`); both ways give the same bits.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 8192
"""Numbers of a program."""
COLUMNS = 1024
"""Most of them in a row."""


def unpack(out: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, table: Tensor, group: int) -> None:
    """Compute `models/quantized.py`'s function of this name; the host does not wait."""
    experts, rows, columns = out.shape
    if not all(tensor.is_contiguous() for tensor in (out, codes, scales, ends)):
        raise ValueError("matrices to unpack, and what they are unpacked into, must be contiguous")
    wide = min(COLUMNS, triton.next_power_of_2(columns))
    high = NUMBERS // wide
    launch: Any = _unpack
    launch[(triton.cdiv(rows, high) * triton.cdiv(columns, wide), experts)](
        *(out, codes, scales, ends, table, rows),
        COLUMNS=columns,
        GROUP=group or columns,
        E4M3=not len(table),
        EXPONENTS=scales.element_size() == 1,
        HIGH=high,
        WIDE=wide,
        num_warps=8,
    )


@triton.jit
def of_e4m3(code: tl.tensor) -> tl.tensor:
    """What codes of 8 bits stand for, in float32."""
    wide = code.to(tl.uint16)
    # The same bits as float16 are 2^-8 times the number, those below its normal range too
    half = ((wide & 0x80) << 8 | (wide & 0x7F) << 7).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def scale_of(scales: tl.tensor, place: tl.tensor, inside: tl.tensor, EXPONENTS: tl.constexpr) -> tl.tensor:
    """The scales at these places in float32."""
    found = tl.load(scales + place, mask=inside, other=0)
    if EXPONENTS:
        bits = tl.where(found == 0, 1 << 22, found.to(tl.int32) << 23)  # the least is no normal number
        return bits.to(tl.float32, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def _unpack(
    out: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    ends: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    E4M3: tl.constexpr,
    EXPONENTS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """Unpack a tile of one expert's matrix, if the expert has a row."""
    expert = tl.program_id(1)
    before = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == before:
        return
    tiles = tl.cdiv(COLUMNS, WIDE)
    row = tl.program_id(0) // tiles * HIGH + tl.arange(0, HIGH)
    first = tl.program_id(0) % tiles * WIDE
    place = (expert * rows + row).to(tl.int64)
    own = place[:, None]
    groups = tl.cdiv(COLUMNS, GROUP)
    column = first + tl.arange(0, WIDE)[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)
    if E4M3:
        code = tl.load(codes + own * COLUMNS + column, mask=inside, other=0)
        numbers = of_e4m3(code) * scale_of(scales, place, row < rows, EXPONENTS)[:, None]
    else:
        byte = first // 2 + tl.arange(0, WIDE // 2)[None, :]
        there = (row < rows)[:, None] & (byte < COLUMNS // 2)
        code = tl.load(codes + own * (COLUMNS // 2) + byte, mask=there, other=0)
        scale = scale_of(scales, own * groups + byte * 2 // GROUP, there, EXPONENTS)
        numbers = tl.interleave(tl.load(table + (code & 15)) * scale, tl.load(table + (code >> 4)) * scale)
    tl.store(out + own * COLUMNS + column, numbers.to(out.dtype.element_ty), mask=inside)
