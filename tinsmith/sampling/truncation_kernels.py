"""The search of `truncation.py` in Triton: sixteen parts at a time, where the reference halves."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Keys of a program."""
BITS = 4
"""Bits of the answer that one pass over the keys finds."""


def last_kept_kernel(keys: Tensor, weights: Tensor | None, least: Tensor) -> Tensor:
    """The largest number [n] int32 for which the keys [n, vocabulary] from it on weigh `least` [n] or more, as in `truncation.py`."""
    rows, vocabulary = keys.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    found = torch.full((rows,), -(2**31), dtype=torch.int64, device=keys.device)
    above = torch.zeros(rows, dtype=torch.int64, device=keys.device)
    parts = torch.empty(rows, chunks, 2**BITS, dtype=torch.int64, device=keys.device)
    count: Any = _count
    descend: Any = _descend
    for shift in range(32 - BITS, -1, -BITS):
        count[(chunks, rows)](
            keys,
            keys if weights is None else weights,
            found,
            parts,
            vocabulary,
            keys.stride(0),
            0 if weights is None else weights.stride(0),
            SHIFT=shift,
            BITS=BITS,
            CHUNK=CHUNK,
            WEIGHTED=weights is not None,
            num_warps=8,
        )
        descend[(rows,)](parts, found, above, least, chunks, SHIFT=shift, BITS=BITS, PADDED=triton.next_power_of_2(chunks), num_warps=1)
    return found.to(torch.int32)


@triton.jit
def _count(
    keys: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    parts: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    weights_stride: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> None:
    """Sum up the weights of one chunk's keys in each of the parts that may hold the answer."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    key = tl.load(keys + row * stride + token, mask=inside, other=0).to(tl.int64)
    part = (key - tl.load(found + row)) >> SHIFT  # beyond the parts on either side there is nothing to count
    weight = tl.full([CHUNK], 1, tl.int64)
    if WEIGHTED:
        weight = tl.load(weights + row * weights_stride + token, mask=inside, other=0)
    own = parts + (row * tl.num_programs(0) + chunk) * (1 << BITS)
    for number in tl.static_range(1 << BITS):
        tl.store(own + number, tl.sum(tl.where(inside & (part == number), weight, 0), 0))


@triton.jit
def _descend(
    parts: tl.tensor,
    found: tl.tensor,
    above: tl.tensor,
    least: tl.tensor,
    chunks: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Return the part in which the answer of one row lies, and the weight of all keys above that part."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, 1 << BITS)
    chunk = tl.arange(0, PADDED)
    place = (row * chunks + chunk[:, None]) * (1 << BITS) + number[None, :]
    weight = tl.sum(tl.load(parts + place, mask=(chunk < chunks)[:, None], other=0), 0)  # [parts]
    before = tl.load(above + row)
    from_here = tl.sum(tl.where(number[None, :] >= number[:, None], weight[None, :], 0), 1) + before  # [parts], falling
    enough = (from_here >= tl.load(least + row)) & (number > 0)
    chosen = tl.sum(enough.to(tl.int64), 0)
    tl.store(above + row, before + tl.sum(tl.where(number > chosen, weight, 0), 0))
    tl.store(found + row, tl.load(found + row) + (chosen << SHIFT))
