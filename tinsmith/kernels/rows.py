"""Triton kernels of the elementwise pieces of any decoder layer; `models/fused.py` says what each computes.

Each program computes one token, or one token's heads, in float32. Gradients of weights are sums over tokens: each
program adds up a stripe of them, every so many tokens, and PyTorch the stripes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.kernels.dispatch import overlapping, with_plain_rows

HEADS = 8
"""Heads that a program rotates at a time."""
COLUMNS = 1024
"""Numbers of a row that a program of SwiGLU takes."""
STRIPES = 256
"""Sums of tokens in a gradient of weights, at most."""


def _whole(width: int) -> dict[str, int]:
    """The options of a kernel whose programs compute whole rows."""
    return {"WIDTH": width, "PADDED": triton.next_power_of_2(width), "num_warps": 4 if width <= 4096 else 8}


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """The norm of x [rows, width]."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    _launch_norm(x, x, weight, x, normed, eps, zero_centred, adds=False)
    return normed


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> tuple[Tensor, Tensor]:
    """The sum of x and delta [rows, width], and its norm."""
    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, delta, weight, total, normed, eps, zero_centred, adds=True)
    return total, normed


def _launch_norm(
    x: Tensor, delta: Tensor, weight: Tensor, total: Tensor, normed: Tensor, eps: float, zero_centred: bool, adds: bool
) -> None:
    rows, width = x.shape
    launch: Any = _norm
    options = {"ZERO_CENTRED": zero_centred, "ADDS": adds, **overlapping(x.device, rows)}
    launch[(rows,)](x, delta, weight, total, normed, eps, **_whole(width), **options)


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of x and delta [rows, width], and the layer norm of it."""
    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    launch: Any = _layer_norm
    launch[(len(x),)](x, delta, weight, bias, total, normed, eps, **_whole(x.shape[1]))
    return total, normed


def rms_norm_backward(
    x: Tensor, weight: Tensor, d_normed: Tensor, d_x: Tensor | None, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x [rows, width], and its norm again."""
    x, d_normed = x.contiguous(), d_normed.contiguous()
    gradient, normed = torch.empty_like(x), torch.empty_like(x)
    launch: Any = _norm_backward
    options = {"ZERO_CENTRED": zero_centred, "ADDS": d_x is not None}
    launch[(len(x),)](
        x,
        weight,
        d_normed,
        x if d_x is None else d_x.contiguous(),
        gradient,
        normed,
        eps,
        **_whole(x.shape[1]),
        **options,
    )
    return gradient, normed


def rms_norm_weight_gradient(x: Tensor, d_normed: Tensor, eps: float) -> Tensor:
    """The gradient of the weight [width] of x and d_normed [rows, width]."""
    x, d_normed = x.contiguous(), d_normed.contiguous()
    rows, width = x.shape
    sums = torch.empty(stripes(rows), width, dtype=torch.float32, device=x.device)
    launch: Any = _norm_weight_gradient
    launch[(len(sums),)](x, d_normed, sums, rows, eps, **_whole(width))
    return sums.sum(0).to(x.dtype)


def stripes(tokens: int) -> int:
    """Return the number of partial sums for so many tokens."""
    return max(1, min(STRIPES, tokens))


def swiglu(gate_up: Tensor) -> Tensor:
    """The product silu(gate) · up of gate_up [rows, 2 · width]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    launch: Any = _swiglu
    options = {"WIDTH": width, "COLUMNS": COLUMNS, "num_warps": 4, **overlapping(gate_up.device, rows)}
    launch[(rows, triton.cdiv(width, COLUMNS))](gate_up, out, **options)
    return out


def swiglu_backward(gate_up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up [rows, 2 · width], and what `swiglu` makes of it again."""
    gate_up, d_out = gate_up.contiguous(), d_out.contiguous()
    rows, width = d_out.shape
    gradient, out = torch.empty_like(gate_up), torch.empty_like(d_out)
    launch: Any = _swiglu_backward
    launch[(rows, triton.cdiv(width, COLUMNS))](
        gate_up, d_out, gradient, out, WIDTH=width, COLUMNS=COLUMNS, num_warps=4
    )
    return gradient, out


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The product (up + 1) · gate · sigmoid(alpha · gate) of clamped numbers in turns, gate_up [rows, 2 · width]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    launch: Any = _clamped_swiglu
    options = {"WIDTH": width, "COLUMNS": COLUMNS, "num_warps": 4, **overlapping(gate_up.device, rows)}
    launch[(rows, triton.cdiv(width, COLUMNS))](gate_up, out, alpha, limit, **options)
    return out


def clamped_swiglu_backward(gate_up: Tensor, d_out: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up [rows, 2 · width], and what `clamped_swiglu` makes of it again."""
    gate_up, d_out = gate_up.contiguous(), d_out.contiguous()
    rows, width = d_out.shape
    gradient, out = torch.empty_like(gate_up), torch.empty_like(d_out)
    launch: Any = _clamped_swiglu_backward
    launch[(rows, triton.cdiv(width, COLUMNS))](
        gate_up, d_out, gradient, out, alpha, limit, WIDTH=width, COLUMNS=COLUMNS, num_warps=4
    )
    return gradient, out


def rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """Heads x [tokens, heads, width], normed if there is a weight, and rotated."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rotation(x, weight, cos, sin, x, out, eps, zero_centred, backward=False)
    return out


def rotate_backward(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    d_out: Tensor,
    eps: float,
    zero_centred: bool,
    gradient: Tensor,
) -> None:
    """Write the gradient of x [tokens, heads, width] to `gradient`."""
    _launch_rotation(x, weight, cos, sin, d_out, gradient, eps, zero_centred, backward=True)


def _launch_rotation(
    x: Tensor,
    weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    d_out: Tensor,
    out: Tensor,
    eps: float,
    zero_centred: bool,
    backward: bool,
) -> None:
    tokens, heads, width = x.shape
    x, d_out = with_plain_rows(x), with_plain_rows(d_out)
    cos, sin = cos.contiguous(), sin.contiguous()
    launch: Any = _rotate_backward if backward else _rotate
    arguments = (
        x,
        *x.stride()[:2],
        x if weight is None else weight,
        cos,
        sin,
        *((d_out, *d_out.stride()[:2]) if backward else ()),
    )
    launch[(tokens, triton.cdiv(heads, HEADS))](
        *(*arguments, out, *out.stride()[:2], heads, eps),
        **_heads_of(width, cos),
        HAS_NORM=weight is not None,
        ZERO_CENTRED=zero_centred,
        **overlapping(x.device, tokens),
    )


def _heads_of(width: int, cos: Tensor) -> dict[str, int]:
    """The options of a kernel that rotates heads."""
    return {
        "WIDTH": width,
        "PADDED": triton.next_power_of_2(width),
        "PAIRS": cos.shape[-1],
        "HEADS": HEADS,
        "num_warps": 4,
    }


def rotate_weight_gradient(x: Tensor, cos: Tensor, sin: Tensor, d_out: Tensor, eps: float) -> Tensor:
    """The gradient of the weight [heads, width]: x and d_out [tokens, heads, width]."""
    tokens, heads, width = x.shape
    x, d_out = with_plain_rows(x), with_plain_rows(d_out)
    sums = torch.empty(stripes(tokens), heads, width, dtype=torch.float32, device=x.device)
    launch: Any = _rotate_weight_gradient
    launch[(len(sums), triton.cdiv(heads, HEADS))](
        *(x, *x.stride()[:2], cos.contiguous(), sin.contiguous(), d_out, *d_out.stride()[:2], sums, tokens, heads, eps),
        **_heads_of(width, cos),
    )
    return sums.sum(0).to(x.dtype)


@triton.jit
def own_heads(heads: tl.tensor, WIDTH: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr) -> tl.tuple:
    """A program's token, its heads [HEADS, 1], their columns [1, PADDED], and which of both exist [HEADS, PADDED]."""
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    column = tl.arange(0, PADDED)[None, :]
    return tl.program_id(0).to(tl.int64), head, column, (head < heads) & (column < WIDTH)


@triton.jit
def _norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Normalize one row."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        # Rounded before it is normed: the next layer adds to what is stored.
        rounded = (wide + tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor += 1.0
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(normed + place, (wide * inverse * factor).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _layer_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Normalize one row."""
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    dtype = total.dtype.element_ty
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + tl.load(
        delta + place, mask=inside, other=0.0
    ).to(tl.float32)
    summed = wide.to(dtype)
    tl.store(total + place, summed, mask=inside)
    wide = summed.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, (centred * inverse * factor + shift).to(dtype), mask=inside)


@triton.jit
def _norm_backward(
    x: tl.tensor,
    weight: tl.tensor,
    d_normed: tl.tensor,
    d_x: tl.tensor,
    gradient: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """Compute the norm's backward for one row."""
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ZERO_CENTRED:
        factor += 1.0
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    d = tl.load(d_normed + place, mask=inside, other=0.0).to(tl.float32) * factor
    found = inverse * d - wide * (inverse * inverse * inverse * (tl.sum(tl.where(inside, d * wide, 0.0), 0) / WIDTH))
    if ADDS:
        found += tl.load(d_x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(gradient + place, found.to(gradient.dtype.element_ty), mask=inside)
    tl.store(normed + place, (wide * inverse * factor).to(normed.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_weight_gradient(
    x: tl.tensor,
    d_normed: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """The rows of one stripe."""
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    total = tl.zeros([PADDED], tl.float32)
    row = tl.program_id(0).to(tl.int64)
    for _ in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        wide = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_normed + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += wide / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps) * d
        row += tl.num_programs(0)
    tl.store(sums + tl.program_id(0) * WIDTH + column, total, mask=inside)


@triton.jit
def _swiglu(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OVERLAPS: tl.constexpr
) -> None:
    """Some columns of one row."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    gate_up: tl.tensor,
    d_out: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    first = row * 2 * WIDTH + column
    gate = tl.load(gate_up + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + first + WIDTH, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    dtype = gradient.dtype.element_ty
    tl.store(gradient + first, (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype), mask=inside)
    tl.store(gradient + first + WIDTH, (d * gate * sigmoid).to(dtype), mask=inside)
    tl.store(out + row * WIDTH + column, (gate * sigmoid * up).to(dtype), mask=inside)


@triton.jit
def _in_turns(
    gate_up: tl.tensor, row: tl.tensor, first: tl.tensor, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
) -> tl.tuple:
    """Gate and up [COLUMNS] in float32, from their columns `first` of one row, and where both lie [2 · COLUMNS]."""
    place = 2 * first + tl.arange(0, 2 * COLUMNS)
    both = tl.load(gate_up + row * 2 * WIDTH + place, mask=place < 2 * WIDTH, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (COLUMNS, 2)))
    return gate, up, place


@triton.jit
def _clamped_swiglu(
    gate_up: tl.tensor,
    out: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some columns of one row."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    gate, up, _ = _in_turns(gate_up, row, first, WIDTH, COLUMNS)
    gate = tl.where(gate > limit, limit, gate)  # NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    column = first + tl.arange(0, COLUMNS)
    found = (up + 1) * gate * tl.sigmoid(alpha * gate)
    tl.store(out + row * WIDTH + column, found.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit
def _clamped_swiglu_backward(
    gate_up: tl.tensor,
    d_out: tl.tensor,
    gradient: tl.tensor,
    out: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    free_gate, free_up, place = _in_turns(gate_up, row, first, WIDTH, COLUMNS)
    gate = tl.where(free_gate > limit, limit, free_gate)  # NaN stays
    up = tl.where(free_up > limit, limit, tl.where(free_up < -limit, -limit, free_up))
    column = first + tl.arange(0, COLUMNS)
    d = tl.load(d_out + row * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(alpha * gate)
    d_gate = tl.where(free_gate > limit, 0.0, d * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid)))
    d_up = tl.where((free_up > limit) | (free_up < -limit), 0.0, d * gate * sigmoid)
    dtype = gradient.dtype.element_ty
    tl.store(gradient + row * 2 * WIDTH + place, tl.interleave(d_gate, d_up).to(dtype), mask=place < 2 * WIDTH)
    tl.store(out + row * WIDTH + column, ((up + 1) * gate * sigmoid).to(dtype), mask=column < WIDTH)


@triton.jit
def _rotate(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    heads: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some heads of one token."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token, head, column, inside = own_heads(heads, WIDTH, PADDED, HEADS)
    turns = column < 2 * PAIRS
    # What a number turns with
    other = tl.where(turns, tl.where(column < PAIRS, column + PAIRS, column - PAIRS), column)
    row = x + token * x_token + head * x_head
    wide = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(row + other, mask=inside & turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.load(weight + head * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        partner_factor = tl.load(weight + head * WIDTH + other, mask=inside & turns, other=0.0).to(tl.float32)
        if ZERO_CENTRED:
            factor += 1.0
            partner_factor += 1.0
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        wide = wide * inverse * factor
        partner = partner * inverse * partner_factor
    angle = tl.where(column < PAIRS, column, column - PAIRS)
    c = tl.load(cos + token * PAIRS + angle, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * PAIRS + angle, mask=turns, other=0.0).to(tl.float32)
    turned = wide * c + tl.where(column < PAIRS, -partner, partner) * s
    tl.store(out + token * out_token + head * out_head + column, turned.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turned_back(
    row: tl.tensor, cos: tl.tensor, sin: tl.tensor, column: tl.tensor, inside: tl.tensor, PAIRS: tl.constexpr
) -> tl.tensor:
    """The gradient in float32 [HEADS, PADDED] of a token's heads before they were rotated.

    `row` [HEADS, 1] is where the gradients of the rotated heads begin.
    """
    turns = column < 2 * PAIRS
    other = tl.where(turns, tl.where(column < PAIRS, column + PAIRS, column - PAIRS), column)
    d = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(row + other, mask=inside & turns, other=0.0).to(tl.float32)
    angle = tl.where(column < PAIRS, column, column - PAIRS)
    c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    return d * c + tl.where(column < PAIRS, partner, -partner) * s


@triton.jit
def _rotate_backward(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    d_out: tl.tensor,
    d_out_token: tl.tensor,
    d_out_head: tl.tensor,
    gradient: tl.tensor,
    gradient_token: tl.tensor,
    gradient_head: tl.tensor,
    heads: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ZERO_CENTRED: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Some heads of one token."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    token, head, column, inside = own_heads(heads, WIDTH, PADDED, HEADS)
    found = _turned_back(
        d_out + token * d_out_token + head * d_out_head, cos + token * PAIRS, sin + token * PAIRS, column, inside, PAIRS
    )
    if HAS_NORM:
        wide = tl.load(x + token * x_token + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(weight + head * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if ZERO_CENTRED:
            factor += 1.0
        inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
        found = found * factor
        mean = (tl.sum(tl.where(inside, found * wide, 0.0), 1) / WIDTH)[:, None]
        found = inverse * found - wide * (inverse * inverse * inverse * mean)
    tl.store(
        gradient + token * gradient_token + head * gradient_head + column,
        found.to(gradient.dtype.element_ty),
        mask=inside,
    )


@triton.jit(do_not_specialize=["tokens"])
def _rotate_weight_gradient(
    x: tl.tensor,
    x_token: tl.tensor,
    x_head: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    d_out: tl.tensor,
    d_out_token: tl.tensor,
    d_out_head: tl.tensor,
    sums: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """Some heads of the tokens of one stripe."""
    token, head, column, inside = own_heads(heads, WIDTH, PADDED, HEADS)
    total = tl.zeros([HEADS, PADDED], tl.float32)
    for _ in range(tl.cdiv(tokens - tl.program_id(0), tl.num_programs(0))):
        wide = tl.load(x + token * x_token + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
        d = _turned_back(
            d_out + token * d_out_token + head * d_out_head,
            cos + token * PAIRS,
            sin + token * PAIRS,
            column,
            inside,
            PAIRS,
        )
        total += wide / tl.sqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None] * d
        token += tl.num_programs(0)
    tl.store(sums + (tl.program_id(0) * heads + head) * WIDTH + column, total, mask=inside)
