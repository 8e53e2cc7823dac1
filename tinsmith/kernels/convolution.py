"""Triton kernels of the short causal convolution of a gated delta net, with its SiLU, over packed sequences.

They compute what `convolve` of `models/delta_rule.py` does. Each program loads what its tokens see of their own
sequence and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import with_plain_rows

TOKENS, CHANNELS = 32, 128
"""Tokens and channels that one program computes."""
GRADIENT_TOKENS = 64
"""Tokens that one program of the weight's gradient sums up."""


@dataclass(frozen=True, eq=False)
class Seats:
    """Position of each token of a packed row within its sequence."""

    sequence: Tensor
    """[tokens] int32: the number of its sequence."""
    behind: Tensor
    """[tokens] int32: the tokens of its sequence before it."""
    ahead: Tensor
    """[tokens] int32: the tokens of its sequence that follow."""


@lru_cache(maxsize=16)
def seats_of(lengths: tuple[int, ...], device: torch.device) -> Seats:
    """The seats of a packed row. The layers of a pass share the answer."""
    counts = np.array(lengths)
    behind = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    ahead = np.repeat(counts, counts) - 1 - behind
    sequence = np.repeat(np.arange(len(counts)), counts)
    return Seats(*(upload(array.astype(np.int32), device) for array in (sequence, behind, ahead)))


def convolution(x: Tensor, weight: Tensor, lengths: tuple[int, ...], before: Tensor | None) -> Tensor:
    """The outputs of `convolve` of `models/delta_rule.py`. `before` gets no gradient."""
    compute: Callable[..., Tensor] = _ConvolutionOnKernels.apply
    return compute(with_plain_rows(x), weight, before, seats_of(lengths, x.device))


class _ConvolutionOnKernels(torch.autograd.Function):
    """Keeps its inputs alone for the backward, which computes the sums below the SiLU again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, weight, before, seats = arguments
        out: Tensor = x.new_empty(x.shape)
        weight, before = weight.contiguous(), None if before is None else before.contiguous()
        launch: Any = _forward
        launch[_grid(x)](
            x,
            x.stride(0),
            weight,
            x if before is None else before,
            seats.sequence,
            seats.behind,
            out,
            *x.shape,
            **_shape(weight, before),
        )
        ctx.seats = seats
        ctx.save_for_backward(x, weight, before)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        d_out = grads[0].contiguous()
        shape, seats = _shape(weight, before), ctx.seats
        inputs = (x, x.stride(0), weight, x if before is None else before, d_out, seats.sequence, seats.behind)
        d_x = x.new_empty(x.shape) if ctx.needs_input_grad[0] else None
        launch: Any = _backward
        if d_x is not None:
            launch[_grid(x)](*inputs, seats.ahead, d_x, *x.shape, **shape)
        d_weight = None
        if ctx.needs_input_grad[1]:
            blocks = triton.cdiv(x.shape[0], GRADIENT_TOKENS)
            parts = x.new_empty(blocks, weight.shape[1], x.shape[1], dtype=torch.float32)
            launch = _of_weight
            launch[(blocks, triton.cdiv(x.shape[1], CHANNELS))](
                *inputs, parts, *x.shape, **shape | {"TOKENS": GRADIENT_TOKENS}
            )
            d_weight = parts.sum(0).t().to(weight.dtype)
        return d_x, d_weight, None, None


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], TOKENS), triton.cdiv(x.shape[1], CHANNELS)


def _shape(weight: Tensor, before: Tensor | None) -> dict[str, int]:
    """Return the constants that a kernel is compiled for."""
    return {"TAPS": weight.shape[1], "CONTINUES": before is not None, "TOKENS": TOKENS, "CHANNELS": CHANNELS}


@triton.jit
def _input(
    x: tl.tensor,
    x_token: tl.tensor,
    before: tl.tensor,
    sequence: tl.tensor,
    behind: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    used: tl.tensor,
    channels: tl.tensor,
    shift: tl.constexpr,
    TAPS: tl.constexpr,
    CONTINUES: tl.constexpr,
) -> tl.tensor:
    """Load the inputs `shift` tokens after each token of its sequence, perhaps before its first.

    The result is float32 [tokens, channels]. `behind` is how many tokens of the sequence stand before `token`, and
    `used` [tokens, channels] says what is read.
    """
    own = used & (behind + shift >= 0)[:, None]
    found = tl.load(x + (token + shift).to(tl.int64)[:, None] * x_token + channel[None, :], mask=own, other=0.0).to(
        tl.float32
    )
    if CONTINUES:
        earlier = used & (behind + shift < 0)[:, None]
        place = (sequence * (TAPS - 1) + TAPS - 1 + behind + shift).to(tl.int64)[:, None] * channels + channel[None, :]
        found += tl.load(before + place, mask=earlier, other=0.0).to(tl.float32)
    return found


@triton.jit
def _sum(
    x: tl.tensor,
    x_token: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    sequence: tl.tensor,
    behind: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    used: tl.tensor,
    channels: tl.tensor,
    shift: tl.constexpr,
    TAPS: tl.constexpr,
    CONTINUES: tl.constexpr,
) -> tl.tensor:
    """The sum below the SiLU of the token that stands `shift` after each: float32 [tokens, channels]."""
    total = tl.zeros(used.shape, tl.float32)
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + channel * TAPS + tap, mask=channel < channels, other=0.0).to(tl.float32)
        total += factor[None, :] * _input(
            x,
            x_token,
            before,
            sequence,
            behind,
            token,
            channel,
            used,
            channels,
            shift + tap - TAPS + 1,
            TAPS,
            CONTINUES,
        )
    return total


@triton.jit
def _slope(total: tl.tensor) -> tl.tensor:
    """The derivative of SiLU."""
    share = tl.sigmoid(total)
    return share * (1 + total * (1 - share))


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    x: tl.tensor,
    x_token: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    sequences: tl.tensor,
    behinds: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    TAPS: tl.constexpr,
    CONTINUES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Some channels of some tokens."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.load(sequences + token, mask=token < tokens, other=0)
    behind = tl.load(behinds + token, mask=token < tokens, other=0)
    used = (token < tokens)[:, None] & (channel < channels)[None, :]
    total = _sum(x, x_token, weight, before, sequence, behind, token, channel, used, channels, 0, TAPS, CONTINUES)
    place = token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(out + place, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize=["tokens"])
def _backward(
    x: tl.tensor,
    x_token: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    d_out: tl.tensor,
    sequences: tl.tensor,
    behinds: tl.tensor,
    aheads: tl.tensor,
    d_x: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    TAPS: tl.constexpr,
    CONTINUES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """The gradient of some channels of some tokens, from the outputs of the next `TAPS` tokens of their sequence."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.load(sequences + token, mask=token < tokens, other=0)
    behind = tl.load(behinds + token, mask=token < tokens, other=0)
    ahead = tl.load(aheads + token, mask=token < tokens, other=-1)
    inside = (channel < channels)[None, :]
    found = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for shift in tl.static_range(TAPS):
        used = (ahead >= shift)[:, None] & inside
        total = _sum(
            x, x_token, weight, before, sequence, behind, token, channel, used, channels, shift, TAPS, CONTINUES
        )
        place = (token + shift).to(tl.int64)[:, None] * channels + channel[None, :]
        d = tl.load(d_out + place, mask=used, other=0.0).to(tl.float32)
        factor = tl.load(weight + channel * TAPS + TAPS - 1 - shift, mask=channel < channels, other=0.0).to(tl.float32)
        found += d * _slope(total) * factor[None, :]
    place = token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(d_x + place, found.to(d_x.dtype.element_ty), mask=(token < tokens)[:, None] & inside)


@triton.jit(do_not_specialize=["tokens"])
def _of_weight(
    x: tl.tensor,
    x_token: tl.tensor,
    weight: tl.tensor,
    before: tl.tensor,
    d_out: tl.tensor,
    sequences: tl.tensor,
    behinds: tl.tensor,
    parts: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    TAPS: tl.constexpr,
    CONTINUES: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Sum up the gradients of some channels' weights over some tokens: parts [blocks, taps, channels]."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    sequence = tl.load(sequences + token, mask=token < tokens, other=0)
    behind = tl.load(behinds + token, mask=token < tokens, other=0)
    used = (token < tokens)[:, None] & (channel < channels)[None, :]
    total = _sum(x, x_token, weight, before, sequence, behind, token, channel, used, channels, 0, TAPS, CONTINUES)
    place = token.to(tl.int64)[:, None] * channels + channel[None, :]
    d_sum = tl.load(d_out + place, mask=used, other=0.0).to(tl.float32) * _slope(total)
    for tap in tl.static_range(TAPS):
        seen = _input(
            x, x_token, before, sequence, behind, token, channel, used, channels, tap - TAPS + 1, TAPS, CONTINUES
        )
        mine = parts + (tl.program_id(0) * TAPS + tap).to(tl.int64) * channels + channel
        tl.store(mine, tl.sum(d_sum * seen, 0), mask=channel < channels)
