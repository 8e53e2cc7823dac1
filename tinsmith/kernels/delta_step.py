"""The Triton kernels of a decoding step of gated delta nets (`sampling/local/states.py`).

They compute in float32, element by element, so that float32 loses nothing. A step is bound by the memory of the states.
Each program holds a part of one state in registers while it reads it, steps it and writes it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS = 256
"""Channels of a program of the convolution."""
COLUMNS = 32
"""Columns of a state, along value_dim, of a program of the delta rule."""


def convolve_kernel(x: Tensor, weight: Tensor, inputs: Tensor, slots: Tensor) -> Tensor:
    """Compute `convolve_step` in a kernel. `inputs` are contiguous."""
    rows, channels = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(rows, channels, dtype=x.dtype, device=x.device)
    kernel: Any = _convolve
    strides = (x.stride(0), slots.stride(0), *weight.stride())
    options = {"WIDTH": channels, "TAPS": weight.shape[1], "CHANNELS": CHANNELS, "num_warps": 4}
    kernel[(triton.cdiv(channels, CHANNELS), rows)](x, weight, inputs, slots, out, *strides, **options)
    return out


def delta_kernel(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, memory: Tensor, slots: Tensor
) -> Tensor:
    """Compute `delta_step` in a kernel. `memory` is contiguous."""
    rows, key_heads, key_dim = key.shape
    value_heads, value_dim = value.shape[1:]
    query, key, value = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (query, key, value))
    decay, beta = (x if x.stride(1) == 1 else x.contiguous() for x in (decay, beta))
    out = torch.empty(rows, value_heads, value_dim, dtype=value.dtype, device=value.device)
    columns = min(COLUMNS, triton.next_power_of_2(value_dim))
    kernel: Any = _delta
    kernel[(triton.cdiv(value_dim, columns), value_heads, rows)](
        *(query, key, value, decay, beta, memory, slots, out),
        *(x.stride(0) for x in (query, key, value, decay, beta, slots)),
        key_dim**-0.5,
        GROUPS=value_heads // key_heads,
        KEY_DIM=key_dim,
        KEY_PADDED=triton.next_power_of_2(key_dim),
        VALUE_HEADS=value_heads,
        VALUE_DIM=value_dim,
        COLUMNS=columns,
        num_warps=4,
    )
    return out


@triton.jit
def _convolve(
    x: tl.tensor,
    weight: tl.tensor,
    inputs: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    slots_stride: tl.tensor,
    weight_stride: tl.tensor,
    tap_stride: tl.tensor,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Some channels of one row."""
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < WIDTH
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    own = inputs + slot * ((TAPS - 1) * WIDTH) + channel
    newest = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
    last = tl.load(weight + channel * weight_stride + (TAPS - 1) * tap_stride, mask=inside, other=0.0)
    total = newest.to(tl.float32) * last.to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        earlier = tl.load(own + tap * WIDTH, mask=inside, other=0.0)
        factor = tl.load(weight + channel * weight_stride + tap * tap_stride, mask=inside, other=0.0)
        total += earlier.to(tl.float32) * factor.to(tl.float32)
        if tap > 0:
            tl.store(own + (tap - 1) * WIDTH, earlier, mask=inside)
    if TAPS > 1:
        tl.store(own + (TAPS - 2) * WIDTH, newest.to(inputs.dtype.element_ty), mask=inside)
    found = total / (1.0 + tl.exp(-total))
    tl.store(out + row.to(tl.int64) * WIDTH + channel, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _delta(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    memory: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    decay_stride: tl.tensor,
    beta_stride: tl.tensor,
    slots_stride: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of the state of one head of one row."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row * slots_stride).to(tl.int64)
    channel = tl.arange(0, KEY_PADDED)
    inside = (channel < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    own = memory + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + channel[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(own, mask=inside, other=0.0)  # [KEY_PADDED, COLUMNS]
    key_place = head // GROUPS * KEY_DIM + channel
    q = tl.load(query + row * query_stride + key_place, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_stride + key_place, mask=channel < KEY_DIM, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_stride + head * VALUE_DIM + column, mask=column < VALUE_DIM, other=0.0).to(
        tl.float32
    )
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    state = state * tl.exp(tl.load(decay + row * decay_stride + head).to(tl.float32))
    update = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + row * beta_stride + head).to(tl.float32)  # [COLUMNS]
    state = state + k[:, None] * update[None, :]
    tl.store(own, state, mask=inside)
    found = tl.sum(state * q[:, None], 0)
    tl.store(
        out + (row * VALUE_HEADS + head) * VALUE_DIM + column, found.to(out.dtype.element_ty), mask=column < VALUE_DIM
    )
