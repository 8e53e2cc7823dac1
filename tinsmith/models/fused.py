"""The elementwise pieces of a decoder layer, forward and backward: norms, rotary positions, gates.

Each is computed in float32 (float64 of float64) and rounded once. A backward takes the inputs of its forward and
computes again what it needs in between, so that nothing else is kept. On a GPU each is a kernel of ours
(`kernels/rows.py`, `kernels/gates.py`).

`Normed`, `SwiGLU` and so on are a `Before`: what `models/packed_lora.py` computes before a linear layer. `Heads` comes
before attention.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, softplus

from tinsmith.kernels.dispatch import with_kernel

Computed = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""The input h [tokens, in] of a linear layer, other results, and what the backward needs: inputs or results."""
Gradients = tuple[list[Tensor | None], Tensor]
"""Gradients of the inputs, and h again."""


class Before(Protocol):
    """Computation on the inputs of a linear layer before it is applied, token by token."""

    @property
    def forward(self) -> Callable[..., Computed]:
        """Compute h of the inputs, each a tensor or None."""
        ...

    def backward(
        self, kept: Sequence[Any], d_h: Tensor, d_others: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Gradients:
        """Compute the gradients of the inputs that are `needed`, from those of h and of the other results."""
        ...


class Unchanged:
    """Nothing: the input of the layer is the input."""

    def forward(self, x: Tensor) -> Computed:
        return x, (), (x,)

    def backward(
        self, kept: Sequence[Any], d_h: Tensor, d_others: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Gradients:
        return [d_h], kept[0]


UNCHANGED = Unchanged()


def _exact(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if it has that."""
    return x if x.dtype == torch.float64 else x.float()


def _factor(weight: Tensor, zero_centred: bool) -> Tensor:
    """Return the factor of a norm: its weight, or its weight plus one."""
    return 1 + _exact(weight) if zero_centred else _exact(weight)


def _inverse(wide: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps)."""
    return torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)


def _through_inverse(wide: Tensor, inverse: Tensor, d: Tensor) -> Tensor:
    """Return the gradient of x where d is that of x · `inverse`."""
    return inverse * d - wide * (inverse * inverse * inverse * (d * wide).mean(-1, keepdim=True))


# RMS norm: y = factor · x / sqrt(mean(x²) + eps)


@with_kernel("rows")
def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """The norm of x [rows, width] with weight [width]."""
    wide = _exact(x)
    return (wide * _inverse(wide, eps) * _factor(weight, zero_centred)).to(x.dtype)


@with_kernel("rows")
def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of x and delta [rows, width], and the layer norm of it."""
    total = x + delta
    return total, layer_norm(total, weight.shape, weight, bias, eps)


@with_kernel("rows")
def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> tuple[Tensor, Tensor]:
    """The sum of x and delta [rows, width], and the norm of it."""
    total = (_exact(x) + _exact(delta)).to(x.dtype)
    wide = _exact(total)
    return total, (wide * _inverse(wide, eps) * _factor(weight, zero_centred)).to(x.dtype)


@with_kernel("rows")
def rms_norm_backward(
    x: Tensor, weight: Tensor, d_normed: Tensor, d_x: Tensor | None, eps: float, zero_centred: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x [rows, width] plus `d_x`, the gradient from other uses of x; and the norm of x again."""
    wide, factor = _exact(x), _factor(weight, zero_centred)
    inverse = _inverse(wide, eps)
    gradient = _through_inverse(wide, inverse, _exact(d_normed) * factor)
    if d_x is not None:
        gradient = gradient + _exact(d_x)
    return gradient.to(x.dtype), (wide * inverse * factor).to(x.dtype)


@with_kernel("rows")
def rms_norm_weight_gradient(x: Tensor, d_normed: Tensor, eps: float) -> Tensor:
    """The gradient of the weight [width]: x and d_normed [rows, width]."""
    wide = _exact(x)
    return (wide * _inverse(wide, eps) * _exact(d_normed)).sum(0).to(x.dtype)


@dataclass(frozen=True)
class Normed:
    """RMSNorm of x [tokens, width] plus `delta` if given: weight [width] -> the norm of the sum, and the sum."""

    eps: float
    zero_centred: bool

    def forward(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Computed:
        if delta is None:
            return rms_norm(x, weight, self.eps, self.zero_centred), (x,), (x, weight)
        total, normed = add_rms_norm(x, delta, weight, self.eps, self.zero_centred)
        return normed, (total,), (total, weight)

    def alone(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        """Compute the norm without a linear layer behind it; differentiable."""
        if not torch.is_grad_enabled():
            return self.forward(x, delta, weight)[0]
        compute: Callable[..., Tensor] = _Alone.apply
        return compute(self, x, delta, weight)

    def with_sum(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the norm and the sum, for what is more than one linear layer; differentiable."""
        if not torch.is_grad_enabled():
            normed, (total,), _ = self.forward(x, delta, weight)
            return normed, total
        compute: Callable[..., tuple[Tensor, Tensor]] = _WithSum.apply
        return compute(self, x, delta, weight)

    def backward(
        self, kept: Sequence[Any], d_h: Tensor, d_others: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Gradients:
        total, weight = kept
        d_total, normed = rms_norm_backward(total, weight, d_h, d_others[0], self.eps, self.zero_centred)
        d_weight = rms_norm_weight_gradient(total, d_h, self.eps) if needed[2] else None
        return [d_total, d_total if needed[1] else None, d_weight], normed


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Normed, *inputs: Any) -> Tensor:
        ctx.kind = kind
        normed, _, kept = kind.forward(*inputs)
        ctx.save_for_backward(*kept)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, _ = ctx.kind.backward(ctx.saved_tensors, grads[0], (None,), ctx.needs_input_grad[1:])
        return None, *found


class _WithSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Normed, *inputs: Any) -> tuple[Tensor, Tensor]:
        ctx.kind = kind
        normed, (total,), kept = kind.forward(*inputs)
        ctx.save_for_backward(*kept)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, _ = ctx.kind.backward(ctx.saved_tensors, grads[0], grads[1:], ctx.needs_input_grad[1:])
        return None, *found


# SwiGLU: silu(gate) · up


@with_kernel("rows")
def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [tokens, 2 · width] -> [tokens, width]."""
    gate, up = gate_up.chunk(2, -1)
    wide = _exact(gate)
    return (wide * torch.sigmoid(wide) * _exact(up)).to(gate_up.dtype)


@with_kernel("rows")
def swiglu_backward(gate_up: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up [tokens, 2 · width], and what `swiglu` makes of it again."""
    gate, up = (_exact(half) for half in gate_up.chunk(2, -1))
    d, sigmoid = _exact(d_out), torch.sigmoid(gate)
    d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
    d_up = d * gate * sigmoid
    return torch.cat([d_gate, d_up], -1).to(gate_up.dtype), (gate * sigmoid * up).to(gate_up.dtype)


# The activation of GPT-OSS's experts: (up + 1) · gate · sigmoid(alpha · gate) of clamped numbers


@with_kernel("rows")
def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """gate_up [rows, 2 · width], whose columns are gate and up in turns -> [rows, width]."""
    gate, up = _exact(gate_up).unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    out: Tensor = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return out.to(gate_up.dtype)


@with_kernel("rows")
def clamped_swiglu_backward(gate_up: Tensor, d_out: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up [rows, 2 · width], and what `clamped_swiglu` makes of it again.

    What is clamped has no gradient.
    """
    free_gate, free_up = _exact(gate_up).unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = free_gate.clamp(max=limit), free_up.clamp(-limit, limit)
    d, sigmoid = _exact(d_out), torch.sigmoid(alpha * gate)
    d_gate = d * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    d_up = d * gate * sigmoid
    both = torch.stack([d_gate.masked_fill(free_gate > limit, 0), d_up.masked_fill(free_up.abs() > limit, 0)], -1)
    return both.flatten(-2).to(gate_up.dtype), ((up + 1) * gate * sigmoid).to(gate_up.dtype)


class SwiGLU:
    """Input gate_up [tokens, 2 · width] -> [tokens, width]."""

    def forward(self, gate_up: Tensor) -> Computed:
        return swiglu(gate_up), (), (gate_up,)

    def backward(
        self, kept: Sequence[Any], d_h: Tensor, d_others: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Gradients:
        d_gate_up, out = swiglu_backward(kept[0], d_h)
        return [d_gate_up], out


# The gate of attention: x · sigmoid(gate)


@with_kernel("gates")
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """The product: x and gate have one shape."""
    return (_exact(x) * torch.sigmoid(_exact(gate))).to(x.dtype)


@with_kernel("gates")
def sigmoid_gate_backward(x: Tensor, gate: Tensor, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and gate, and what `sigmoid_gate` makes of them again."""
    wide, d, sigmoid = _exact(x), _exact(d_out), torch.sigmoid(_exact(gate))
    out = wide * sigmoid
    return (d * sigmoid).to(x.dtype), (d * out * (1 - sigmoid)).to(x.dtype), out.to(x.dtype)


class SigmoidGated:
    """Inputs x and gate [tokens, heads, width] -> [tokens, heads · width]."""

    def forward(self, x: Tensor, gate: Tensor) -> Computed:
        return sigmoid_gate(x, gate).flatten(1), (), (x, gate)

    def backward(
        self, kept: Sequence[Any], d_h: Tensor, d_others: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Gradients:
        d_x, d_gate, out = sigmoid_gate_backward(kept[0], kept[1], d_h.view(kept[0].shape))
        return [d_x, d_gate], out.flatten(1)


# The gated norm of a gated delta net: norm(x) · silu(gate), for each head


@with_kernel("gates")
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In the shape of x: x and gate [tokens, heads, width], weight [width]."""
    wide, g = _exact(x), _exact(gate)
    normed = wide * _inverse(wide, eps) * _exact(weight)
    return (normed * g * torch.sigmoid(g)).to(x.dtype)


@with_kernel("gates")
def gated_rms_norm_backward(
    x: Tensor, gate: Tensor, weight: Tensor, d_out: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x and gate [tokens, heads, width], and what `gated_rms_norm` makes of them again."""
    wide, g, d, factor = _exact(x), _exact(gate), _exact(d_out), _exact(weight)
    inverse = _inverse(wide, eps)
    sigmoid = torch.sigmoid(g)
    normed, silu = wide * inverse * factor, g * sigmoid
    d_x = _through_inverse(wide, inverse, d * silu * factor)
    d_gate = d * normed * sigmoid * (1 + g * (1 - sigmoid))
    return d_x.to(x.dtype), d_gate.to(x.dtype), (normed * silu).to(x.dtype)


@with_kernel("gates")
def gated_rms_norm_weight_gradient(x: Tensor, gate: Tensor, d_out: Tensor, eps: float) -> Tensor:
    """The gradient of the weight [width]: x, gate and d_out [tokens, heads, width]."""
    wide, g = _exact(x), _exact(gate)
    return (wide * _inverse(wide, eps) * _exact(d_out) * g * torch.sigmoid(g)).sum((0, 1)).to(x.dtype)


@dataclass(frozen=True)
class GatedNormed:
    """Inputs x and gate [tokens, heads, width], and the weight [width] -> [tokens, heads · width]."""

    eps: float

    def forward(self, x: Tensor, gate: Tensor, weight: Tensor) -> Computed:
        return gated_rms_norm(x, gate, weight, self.eps).flatten(1), (), (x, gate, weight)

    def backward(
        self, kept: Sequence[Any], d_h: Tensor, d_others: Sequence[Tensor | None], needed: Sequence[bool]
    ) -> Gradients:
        x, gate, weight = kept
        d_out = d_h.view(x.shape)
        d_x, d_gate, out = gated_rms_norm_backward(x, gate, weight, d_out, self.eps)
        d_weight = gated_rms_norm_weight_gradient(x, gate, d_out, self.eps) if needed[2] else None
        return [d_x, d_gate, d_weight], out.flatten(1)


# Queries and keys: a norm for each head, if the model has one, then the rotation by their positions


@with_kernel("rows")
def rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, zero_centred: bool) -> Tensor:
    """In the shape of x: x [tokens, heads, width], weight [heads, width], cos and sin [tokens, pairs].

    Number j of the first `pairs` of a head turns with number pairs + j; those behind 2 · pairs stay.
    """
    wide = _exact(x)
    if weight is not None:
        wide = wide * _inverse(wide, eps) * _factor(weight, zero_centred)
    return _turned(wide, _exact(cos), _exact(sin)).to(x.dtype)


def _turned(wide: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs, c, s = cos.shape[-1], cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = wide[..., :pairs], wide[..., pairs : 2 * pairs]
    return torch.cat([first * c - second * s, second * c + first * s, wide[..., 2 * pairs :]], -1)


def _turned_back(d: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient [tokens, heads, width] of what was rotated, where d is that of the result."""
    return _turned(_exact(d), _exact(cos), -_exact(sin))


@with_kernel("rows")
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
    d = _turned_back(d_out, cos, sin)
    if weight is not None:
        wide = _exact(x)
        d = _through_inverse(wide, _inverse(wide, eps), d * _factor(weight, zero_centred))
    gradient.copy_(d)


@with_kernel("rows")
def rotate_weight_gradient(x: Tensor, cos: Tensor, sin: Tensor, d_out: Tensor, eps: float) -> Tensor:
    """The gradient of the weight [heads, width]: x and d_out [tokens, heads, width]."""
    wide = _exact(x)
    return (wide * _inverse(wide, eps) * _turned_back(d_out, cos, sin)).sum(0).to(x.dtype)


@dataclass(frozen=True)
class Heads:
    """Layout of queries, keys and values in the output of their joint projection."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool
    """Behind the query of each head lies the gate of its output."""
    eps: float
    """Epsilon of the norms of queries and keys, if there are any."""
    zero_centred: bool

    def cut(self, qkv: Tensor) -> tuple[list[Tensor], Tensor, Tensor | None]:
        """Views of qkv [tokens, out]: what is rotated, in one piece or as queries and keys; values; gates.

        Each [tokens, heads, width].
        """
        queries = self.heads * self.head_dim * (2 if self.gated else 1)
        keys = self.kv_heads * self.head_dim
        value = qkv.narrow(1, queries + keys, keys).view(-1, self.kv_heads, self.head_dim)
        if not self.gated:
            return [qkv.narrow(1, 0, queries + keys).view(-1, self.heads + self.kv_heads, self.head_dim)], value, None
        both = qkv[:, :queries].unflatten(1, (self.heads, 2 * self.head_dim))
        key = qkv[:, queries : queries + keys].unflatten(1, (self.kv_heads, self.head_dim))
        return [both[..., : self.head_dim], key], value, both[..., self.head_dim :]

    def forward(self, qkv: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """Query, key, value and, if gated, gate [tokens, heads or kv_heads, head_dim] of qkv [tokens, out].

        weight [heads + kv_heads, head_dim] is that of the norms of all heads. Value and gate are views of qkv.
        """
        if torch.is_grad_enabled():
            compute: Callable[..., tuple[Tensor, ...]] = _Heads.apply
            return compute(self, qkv, weight, cos, sin)
        rotated, value, gate = self.cut(qkv)
        weights = self._weights(weight, len(rotated))
        turned = [
            rotate(x, own, cos, sin, self.eps, self.zero_centred) for x, own in zip(rotated, weights, strict=True)
        ]
        query, key = turned if len(turned) == 2 else (turned[0][:, : self.heads], turned[0][:, self.heads :])
        return (query, key, value) if gate is None else (query, key, value, gate)

    def _weights(self, weight: Tensor | None, pieces: int) -> list[Tensor | None]:
        if weight is None:
            return [None] * pieces
        return [weight] if pieces == 1 else [weight[: self.heads], weight[self.heads :]]


class _Heads(torch.autograd.Function):
    """`Heads.forward`: keeps qkv alone, and writes the gradients of all parts of it next to each other."""

    @staticmethod
    def forward(
        ctx: Any, heads: Heads, qkv: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.heads = heads
        ctx.save_for_backward(qkv, weight, cos, sin)
        return heads.forward(qkv, weight, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        heads: Heads = ctx.heads
        qkv, weight, cos, sin = ctx.saved_tensors
        gradient = torch.empty_like(qkv)
        d_rotated, d_value, d_gate = heads.cut(gradient)
        for view, found in ((d_value, grads[2]), (d_gate, grads[3] if heads.gated else None)):
            if view is not None:
                view.zero_() if found is None else view.copy_(found)
        rotated = heads.cut(qkv)[0]
        if len(rotated) == 1:
            rotated, d_rotated = ([x[:, : heads.heads], x[:, heads.heads :]] for x in (rotated[0], d_rotated[0]))
        d_weights: list[Tensor] = []
        for x, own, d_out, view in zip(rotated, heads._weights(weight, 2), grads[:2], d_rotated, strict=True):
            if d_out is None:
                view.zero_()
                if own is not None:
                    d_weights.append(torch.zeros_like(own))
                continue
            rotate_backward(x, own, cos, sin, d_out, heads.eps, heads.zero_centred, view)
            if own is not None and ctx.needs_input_grad[2]:
                d_weights.append(rotate_weight_gradient(x, cos, sin, d_out, heads.eps))
        return None, gradient, torch.cat(d_weights) if ctx.needs_input_grad[2] else None, None, None


# Decay and strength of what a gated delta net remembers


@with_kernel("gates")
def memory_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """The log decay in float32, and beta in the dtype of b: a and b [tokens, heads], a_log and dt_bias [heads]."""
    return -_exact(a_log).exp() * softplus(_exact(a) + _exact(dt_bias)), torch.sigmoid(_exact(b)).to(b.dtype)


@with_kernel("gates")
def memory_gates_backward(
    a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, d_decay: Tensor, d_beta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a and b [tokens, heads]; and that of a_log [tokens, heads], to be summed over the tokens."""
    shifted, scale = _exact(a) + _exact(dt_bias), -_exact(a_log).exp()
    beta, d = torch.sigmoid(_exact(b)), _exact(d_decay)
    d_a = d * scale * torch.sigmoid(shifted)
    return d_a.to(a.dtype), (_exact(d_beta) * beta * (1 - beta)).to(b.dtype), d * scale * softplus(shifted)


def decay_and_beta(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """`memory_gates`, differentiable."""
    if not torch.is_grad_enabled():
        return memory_gates(a, b, a_log, dt_bias)
    compute: Callable[..., tuple[Tensor, Tensor]] = _Gates.apply
    return compute(a, b, a_log, dt_bias)


class _Gates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return memory_gates(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b, a_log, dt_bias = ctx.saved_tensors
        d_a, d_b, d_a_log = memory_gates_backward(a, b, a_log, dt_bias, *grads)
        wants_a_log, wants_dt_bias = ctx.needs_input_grad[2:]
        return (
            d_a,
            d_b,
            d_a_log.sum(0).to(a_log.dtype) if wants_a_log else None,
            d_a.sum(0, dtype=d_a_log.dtype).to(dt_bias.dtype) if wants_dt_bias else None,
        )
