"""Triton kernels of the gates in hybrid models: those of attention, of the norm behind a delta rule, and of its memory.

`models/fused.py` says what each computes. Inputs are parts of wider rows, outputs lie one row behind the other.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.kernels.dispatch import overlapping, with_plain_rows
from tinsmith.kernels.rows import HEADS, own_heads, stripes

NUMBERS = 1024
"""Gates of memory that a program computes."""


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """The product x · sigmoid(gate) of x and gate [tokens, heads, width]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_gated, x, gate, None, 0.0, out)
    return out


def sigmoid_gate_backward(x: Tensor, gate: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and gate [tokens, heads, width], and `sigmoid_gate` of them again."""
    d_x, d_gate, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(3))
    _launch(_gated_backward, x, gate, None, 0.0, d_out.contiguous(), d_x, d_gate, out)
    return d_x, d_gate, out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x times silu(gate): x and gate [tokens, heads, width], weight [width]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_gated, x, gate, weight, eps, out)
    return out


def gated_rms_norm_backward(
    x: Tensor, gate: Tensor, weight: Tensor, d_out: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and gate [tokens, heads, width], and `gated_rms_norm` of them again."""
    d_x, d_gate, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(3))
    _launch(_gated_backward, x, gate, weight, eps, d_out.contiguous(), d_x, d_gate, out)
    return d_x, d_gate, out


def _launch(kernel: Any, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, *others: Tensor) -> None:
    """A program for some heads of each token. Without a weight nothing is normed, and the gate is a sigmoid."""
    tokens, heads, width = x.shape
    x, gate = with_plain_rows(x), with_plain_rows(gate)
    kernel[(tokens, triton.cdiv(heads, HEADS))](
        *(x, *x.stride()[:2], gate, *gate.stride()[:2], x if weight is None else weight, eps, *others, heads),
        NORMS=weight is not None,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        HEADS=HEADS,
        num_warps=4,
        **overlapping(x.device, tokens),
    )


def gated_rms_norm_weight_gradient(x: Tensor, gate: Tensor, d_out: Tensor, eps: float) -> Tensor:
    """The gradient of the weight [width]: x, gate and d_out [tokens, heads, width]."""
    tokens, heads, width = x.shape
    x, gate = with_plain_rows(x), with_plain_rows(gate)
    sums = torch.empty(stripes(tokens), heads, width, dtype=torch.float32, device=x.device)
    launch: Any = _gated_norm_weight_gradient
    launch[(len(sums), triton.cdiv(heads, HEADS))](
        *(x, *x.stride()[:2], gate, *gate.stride()[:2], eps, d_out.contiguous(), sums, tokens, heads),
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
        HEADS=HEADS,
        num_warps=4,
    )
    return sums.sum((0, 1)).to(x.dtype)


def memory_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay in float32, and beta in the dtype of b: a and b [tokens, heads], a_log and dt_bias [heads]."""
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    _launch_memory(_memory_gates, a, b, (a_log, dt_bias, decay, beta))
    return decay, beta


def memory_gates_backward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, d_decay: Tensor, d_beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a, b and a_log [tokens, heads]; that of a_log in float32, to be summed over the tokens."""
    d_a, d_b = (torch.empty(a.shape, dtype=x.dtype, device=a.device) for x in (a, b))
    d_a_log = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    _launch_memory(
        _memory_gates_backward, a, b, (a_log, dt_bias, d_decay.contiguous(), d_beta.contiguous(), d_a, d_b, d_a_log)
    )
    return d_a, d_b, d_a_log


def _launch_memory(kernel: Any, a: Tensor, b: Tensor, others: tuple[Tensor, ...]) -> None:
    tokens, heads = a.shape
    a, b = with_plain_rows(a), with_plain_rows(b)
    grid = (triton.cdiv(tokens * heads, NUMBERS),)
    options = {"NUMBERS": NUMBERS, "num_warps": 4, **overlapping(a.device, tokens)}
    kernel[grid](a, a.stride(0), b, b.stride(0), *others, tokens, heads, **options)


@triton.jit
def _wide(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Some heads of a token [HEADS, PADDED] in float32."""
    return tl.load(x + token * x_token + head * x_head + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _gated(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    gate: tl.tensor,
    gate_token: tl.tensor,
    gate_head: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    NORMS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some heads of one token."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token, head, column, inside = own_heads(heads, WIDTH, PADDED, HEADS)
    found = _wide(x, x_token, x_head, token, head, column, inside)
    g = _wide(gate, gate_token, gate_head, token, head, column, inside)
    if NORMS:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        found = found / tl.sqrt(tl.sum(found * found, 1) / WIDTH + eps)[:, None] * factor * g
    tl.store(
        out + (token * heads + head) * WIDTH + column, (found * tl.sigmoid(g)).to(out.dtype.element_ty), mask=inside
    )


@triton.jit
def _gated_backward(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    gate: tl.tensor,
    gate_token: tl.tensor,
    gate_head: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    d_out: tl.tensor,
    d_x: tl.tensor,
    d_gate: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    NORMS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some heads of one token."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token, head, column, inside = own_heads(heads, WIDTH, PADDED, HEADS)
    wide = _wide(x, x_token, x_head, token, head, column, inside)
    g = _wide(gate, gate_token, gate_head, token, head, column, inside)
    place = (token * heads + head) * WIDTH + column
    d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    if NORMS:
        factor = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        value, opened, slope = wide * inverse * factor, g * sigmoid, sigmoid * (1 + g * (1 - sigmoid))
        d_normed = d * opened * factor
        mean = (tl.sum(d_normed * wide, 1) / WIDTH)[:, None]
        found = inverse * d_normed - wide * (inverse * inverse * inverse * mean)
    else:
        value, opened, slope = wide, sigmoid, sigmoid * (1 - sigmoid)
        found = d * opened
    tl.store(d_x + place, found.to(out.dtype.element_ty), mask=inside)
    tl.store(d_gate + place, (d * value * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(out + place, (value * opened).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _gated_norm_weight_gradient(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    gate: tl.tensor,
    gate_token: tl.tensor,
    gate_head: tl.tensor,
    eps: tl.tensor,
    d_out: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Some heads of the tokens of one stripe."""
    token, head, column, inside = own_heads(heads, WIDTH, PADDED, HEADS)
    total = tl.zeros([HEADS, PADDED], tl.float32)
    for _ in range(tl.cdiv(tokens - tl.program_id(0), tl.num_programs(0))):
        wide = _wide(x, x_token, x_head, token, head, column, inside)
        g = _wide(gate, gate_token, gate_head, token, head, column, inside)
        d = tl.load(d_out + (token * heads + head) * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += wide / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None] * d * g * tl.sigmoid(g)
        token += tl.num_programs(0)
    tl.store(sums + (tl.program_id(0) * heads + head) * WIDTH + column, total, mask=inside)


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), as exact for small exp(x) as log1p (Kahan's formula)."""
    small = tl.exp(tl.where(x > 20.0, 20.0, x))  # a minimum would make a number of NaN
    more = 1.0 + small
    exact = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit(do_not_specialize=["tokens"])
def _memory_gates(
    a: tl.tensor,
    a_token: tl.tensor,
    b: tl.tensor,
    b_token: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    decay: tl.tensor,
    beta: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    NUMBERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some numbers, one head of a token behind the other."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    token, head, inside = (number // heads).to(tl.int64), number % heads, number < tokens * heads
    shifted = tl.load(a + token * a_token + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(
        tl.float32
    )
    scale = -tl.exp(tl.load(a_log + head).to(tl.float32))
    tl.store(decay + number, scale * _softplus(shifted), mask=inside)
    strength = tl.sigmoid(tl.load(b + token * b_token + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(beta + number, strength.to(beta.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _memory_gates_backward(
    a: tl.tensor,
    a_token: tl.tensor,
    b: tl.tensor,
    b_token: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    d_decay: tl.tensor,
    d_beta: tl.tensor,
    d_a: tl.tensor,
    d_b: tl.tensor,
    d_a_log: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    NUMBERS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some numbers, one head of a token behind the other."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    token, head, inside = (number // heads).to(tl.int64), number % heads, number < tokens * heads
    shifted = tl.load(a + token * a_token + head, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias + head).to(
        tl.float32
    )
    scale = -tl.exp(tl.load(a_log + head).to(tl.float32))
    strength = tl.sigmoid(tl.load(b + token * b_token + head, mask=inside, other=0.0).to(tl.float32))
    d = tl.load(d_decay + number, mask=inside, other=0.0).to(tl.float32)
    d_strength = tl.load(d_beta + number, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_a + number, (d * scale * tl.sigmoid(shifted)).to(d_a.dtype.element_ty), mask=inside)
    tl.store(d_b + number, (d_strength * strength * (1 - strength)).to(d_b.dtype.element_ty), mask=inside)
    tl.store(d_a_log + number, d * scale * _softplus(shifted), mask=inside)
