"""The gated delta rule over packed sequences, in chunks of tokens that take a few large matrix products.

Each sequence is cut into chunks of its own; the last is filled up with zeros, which change neither outputs nor states.
Notation for one chunk of one head (Yang et al., arXiv 2412.06464), with q, k, v [chunk, dim] as rows, S the state
before it, t the running sum of the decays (logarithms), and D_ij = exp(t_i - t_j) for j <= i, 0 elsewhere:

    L = strict lower triangle of β_i (k kᵀ)_ij D_ij       how the update of each token sees the updates before it
    [W | V'] = (I + L)⁻¹ [β exp(t) k | β v]
    U = V' - W S                                          the update of each token
    out = exp(t) q S + P U,                               P = (q kᵀ) ∘ D
    S' = exp(t_end) S + Rᵀ U,                             R = exp(t_end - t) k

Everything but U and S' is computed for all chunks of all sequences at once. These two take a multiplication each for
each chunk index, for all sequences that are that long. (S' = M S + Rᵀ V' with M = exp(t_end) I - Rᵀ W would take one,
but M is larger than all else.)

The backward keeps the inputs alone and computes the rest again, which saves most of the memory of a layer.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import half_on_gpu

SMALLEST, LARGEST = 16, 64
"""Tokens of a chunk: about a head's width, which balances the work, but no more than the longest sequence fills."""
SLICE_NUMBERS = 2**25
"""Queries, keys or values of the heads that are computed together, at most, which bounds the memory of a long row."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a packed row, ordered by their number inside their sequence.

    Among those of one number the longest sequences come first, so that the first ones go on to the next number.
    """

    size: int
    slabs: tuple[tuple[int, int], ...]
    """Chunks [start, end) of each number."""
    chunk: Tensor
    """[tokens] int64: the chunk of each token."""
    place: Tensor
    """[tokens] int64: its place inside the chunk."""
    order: Tensor
    """[sequences] int64: the sequences by falling number of chunks."""
    rank: Tensor
    """[sequences] int64: where each sequence stands in that order."""

    @property
    def count(self) -> int:
        """Chunks of the row."""
        return self.slabs[-1][1]

    def goes_on(self, number: int) -> int:
        """Count the sequences that have a chunk after chunk `number`."""
        return self.slabs[number + 1][1] - self.slabs[number + 1][0] if number + 1 < len(self.slabs) else 0

    def spread(self, x: Tensor, groups: int = 1) -> Tensor:
        """[tokens, heads, dim] -> [chunks · heads · groups, size, dim]; zeros where a chunk has no token.

        Each head comes `groups` times.
        """
        heads, dim = x.shape[1:]
        spread = x.new_zeros(self.count, heads, groups, self.size, dim)
        spread[self.chunk, :, :, self.place] = x.unsqueeze(2)
        return spread.view(-1, self.size, dim)

    def collect(self, x: Tensor, heads: int) -> Tensor:
        """[chunks · heads, size, dim] -> [tokens, heads, dim]; also [chunks · heads, size] -> [tokens, heads]."""
        found: Tensor = x.unflatten(0, (self.count, heads))[self.chunk, :, self.place]
        return found


@lru_cache(maxsize=16)
def chunks_of(lengths: tuple[int, ...], width: int, device: torch.device) -> Chunks:
    """Cut a packed row into chunks for keys of this width. The layers of a pass share the result."""
    size = max(SMALLEST, min(LARGEST, 1 << (min(max(lengths), width) - 1).bit_length()))
    tokens = np.array(lengths)
    counts = -(-tokens // size)  # [sequences]
    order = np.argsort(-counts, kind="stable")
    rank = np.argsort(order)
    widths = [int((counts > number).sum()) for number in range(int(counts.max()))]
    starts = np.concatenate([[0], np.cumsum(widths)])
    offsets = np.concatenate([np.arange(length) for length in lengths])  # [tokens]
    chunk = starts[offsets // size] + np.repeat(rank, tokens)
    slabs = tuple((int(start), int(end)) for start, end in itertools.pairwise(starts))
    indices = (upload(array, device) for array in (chunk, offsets % size, order, rank))
    return Chunks(size, slabs, *indices)


def delta_rule_in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunks: Chunks,
    before: Tensor | None,
    keeps: bool = True,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of `models/delta_rule.py`, in chunks. Unless `keeps`, the states are an empty tensor."""
    compute: Callable[..., tuple[Tensor, Tensor]] = _DeltaRule.apply
    return compute(query, key, value, decay, beta, before, chunks, keeps)


class _Inputs(NamedTuple):
    """Inputs of `gated_delta_rule` for some heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    before: Tensor | None

    def slices(self, chunks: Chunks) -> list[tuple[slice, "_Inputs"]]:
        """Slices of the value heads that `SLICE_NUMBERS` allows, and their inputs."""
        found = []
        most = SLICE_NUMBERS // (chunks.count * chunks.size * max(self.key.shape[2], self.value.shape[2]))
        for keys, values in slices_of_heads(self.key, self.value, most):
            before = (
                None
                if self.before is None
                else self.before[:, values].to(torch.promote_types(self.value.dtype, torch.float32))
            )
            value, decay, beta = (x[:, values] for x in (self.value, self.decay, self.beta))
            found.append((values, _Inputs(self.query[:, keys], self.key[:, keys], value, decay, beta, before)))
        return found


def slices_of_heads(key: Tensor, value: Tensor, most: int) -> list[tuple[slice, slice]]:
    """Slices of the key heads, and of at most `most` value heads that share them.

    Each slice has the value heads of one key head at least.
    """
    key_heads, groups = key.shape[1], value.shape[1] // key.shape[1]
    many = max(1, min(key_heads, most // groups))
    firsts = range(0, key_heads, many)
    return [(slice(first, first + many), slice(first * groups, (first + many) * groups)) for first in firsts]


class _Spread(NamedTuple):
    """The inputs of some heads, chunk by chunk; B = chunks · value_heads."""

    value: Tensor
    """[B, size, value_dim]"""
    query: Tensor
    """[B, size, key_dim]"""
    key: Tensor
    """[B, size, key_dim]"""
    decay: Tensor
    """[B, size, 1]"""
    beta: Tensor
    """[B, size, 1]"""


def _spread(inputs: _Inputs, chunks: Chunks) -> _Spread:
    groups = inputs.value.shape[1] // inputs.key.shape[1]
    query, key = chunks.spread(inputs.query, groups), chunks.spread(inputs.key, groups)
    return _Spread(
        chunks.spread(inputs.value), query, key, *(chunks.spread(x.unsqueeze(-1)) for x in (inputs.decay, inputs.beta))
    )


class _Local(NamedTuple):
    """Values that chunks of some heads compute before the recurrence, in float32 or float64."""

    query: Tensor
    """[B, size, key_dim], of length 1 / sqrt(key_dim)"""
    key: Tensor
    """[B, size, key_dim], of length 1"""
    total: Tensor
    """[B, size, 1]: exp(t)"""
    rest: Tensor
    """[B, size, 1]: exp(t_end - t)"""
    between: Tensor
    """D [B, size, size]"""
    similar: Tensor
    """(k kᵀ) ∘ D [B, size, size], of which the strict lower triangle counts"""
    inverse: Tensor
    """(I + L)⁻¹ [B, size, size]"""
    seen: Tensor
    """W [B, size, key_dim]"""
    solved: Tensor
    """V' [B, size, value_dim]"""
    left: Tensor
    """R [B, size, key_dim]"""
    attended: Tensor
    """P [B, size, size]"""

    @property
    def kept(self) -> Tensor:
        """exp(t_end) [B, 1, 1]: what is left of a state behind the chunk."""
        return self.total[:, -1:]


def _local(spread: _Spread) -> _Local:
    value, query, key, decay, beta = spread
    dtype = torch.promote_types(value.dtype, torch.float32)
    size = value.shape[1]
    q = unit(query.to(dtype)) * key.shape[2] ** -0.5
    k = unit(key.to(dtype))
    b = beta.to(dtype)
    t = decay.to(dtype).cumsum(1)  # [B, size, 1]
    later = torch.ones(size, size, dtype=torch.bool, device=value.device).triu(1)
    between = (t - t.mT).masked_fill(later, -torch.inf).exp()
    similar = torch.bmm(k, k.mT) * between
    inverse = _unit_lower_inverse((similar * b).tril(-1))
    total = t.exp()
    rest = (t[:, -1:] - t).exp()
    seen, solved = torch.bmm(inverse, k * (b * total)), torch.bmm(inverse, value.to(dtype) * b)
    return _Local(q, k, total, rest, between, similar, inverse, seen, solved, k * rest, torch.bmm(q, k.mT) * between)


def unit(x: Tensor) -> Tensor:
    """The vectors along the last dimension of x, brought to length one."""
    return x * _inverse_length(x)


def _inverse_length(x: Tensor) -> Tensor:
    return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _unit_lower_inverse(lower: Tensor) -> Tensor:
    """(I + L)⁻¹ of strictly lower triangular L [B, size, size], as stable as forward substitution.

    Inverses of blocks on the diagonal are joined to those of blocks twice as large: with A, B on the diagonal and C
    below A, what is below A⁻¹ becomes -B⁻¹ C A⁻¹. All blocks of one size are joined at once, up to `SMALLEST` in blocks
    that are cut out for that.
    """
    size = lower.shape[-1]
    # [B, 16, 16, size / 16]
    small = lower.unflatten(1, (-1, SMALLEST)).unflatten(3, (-1, SMALLEST)).diagonal(dim1=1, dim2=3)
    inverses = _join_blocks(small.movedim(-1, 1).flatten(0, 1), None, 1)
    if size == SMALLEST:
        return inverses
    blocks = inverses.unflatten(0, (-1, size // SMALLEST))  # [B, size / 16, 16, 16]
    diagonal = torch.eye(size // SMALLEST, dtype=torch.bool, device=lower.device)[:, None, :, None]
    # [B, size / 16, 16, size / 16, 16]: each block on the diagonal, zeros elsewhere, whatever stands in the blocks
    return _join_blocks(lower, torch.where(diagonal, blocks.unsqueeze(3), 0.0).flatten(3, 4).flatten(1, 2), SMALLEST)


def _join_blocks(lower: Tensor, inverse: Tensor | None, block: int) -> Tensor:
    """Compute the inverse from those of its diagonal blocks of `block` rows (None: the identity)."""
    size = lower.shape[-1]
    row = torch.arange(size, device=lower.device)
    while block < size:
        own, pair = row // block, row // (2 * block)
        joins = (pair.unsqueeze(1) == pair) & (own.unsqueeze(1) > own)  # [size, size]: the blocks C
        below = lower.masked_fill(~joins, 0.0)
        if inverse is None:
            inverse = torch.eye(size, dtype=lower.dtype, device=lower.device) - below
        else:
            inverse = torch.baddbmm(inverse, torch.bmm(inverse, below), inverse, alpha=-1)
        block *= 2
    assert inverse is not None
    return inverse


class _Course(NamedTuple):
    """The recurrence of some heads."""

    states: Tensor
    """S, before each chunk [B, key_dim, value_dim]"""
    updates: Tensor
    """U [B, size, value_dim]"""
    after: Tensor
    """The states after each sequence [sequences, heads, key_dim, value_dim], or an empty tensor."""


def _course(local: _Local, chunks: Chunks, heads: int, before: Tensor | None, keeps: bool) -> _Course:
    states = local.solved.new_empty(len(local.solved), local.key.shape[2], local.solved.shape[2])
    updates = torch.empty_like(local.solved)
    begun = chunks.slabs[0][1] * heads
    if before is None:
        states[:begun] = 0.0
    else:
        states[:begun] = before.index_select(0, chunks.order).flatten(0, 1)

    def advance(rows: slice, target: Tensor) -> Tensor:
        """Write into `target` the states behind these chunks."""
        torch.mul(states[rows], local.kept[rows], out=target)
        return target.baddbmm_(local.left[rows].mT, updates[rows])

    ended: list[Tensor] = []
    for number, (first, end) in enumerate((start * heads, end * heads) for start, end in chunks.slabs):
        last = first + chunks.goes_on(number) * heads  # of those that go on
        torch.baddbmm(
            local.solved[first:end], local.seen[first:end], states[first:end], alpha=-1, out=updates[first:end]
        )
        if last > first:
            advance(slice(first, last), states[end : end + last - first])
        if keeps and end > last:
            ended.append(advance(slice(last, end), states.new_empty(end - last, *states.shape[1:])))
    if not keeps:
        return _Course(states, updates, states.new_empty(0, 0))
    return _Course(states, updates, torch.cat(ended[::-1]).unflatten(0, (-1, heads)).index_select(0, chunks.rank))


class _Return(NamedTuple):
    """The recurrence of some heads, backward."""

    states: Tensor
    """The gradients of the state after each chunk [B, key_dim, value_dim]."""
    updates: Tensor
    """The gradients of U [B, size, value_dim]."""
    before: Tensor | None
    """The gradients of the states before each sequence."""


def _return(
    local: _Local, chunks: Chunks, heads: int, d_out: Tensor, d_after: Tensor | None, wants_before: bool
) -> _Return:
    """`d_out` [B, size, value_dim] are the gradients of the outputs."""
    updates = torch.bmm(local.attended.mT, d_out)
    # Of the state before each chunk, by what the chunk reads of it
    direct = torch.bmm((local.query * local.total).mT, d_out)
    gradients = torch.zeros_like(direct)
    # [sequences · heads, ...]
    by_rank = None if d_after is None else d_after.index_select(0, chunks.order).flatten(0, 1)
    at_start: Tensor | None = None
    for number in range(len(chunks.slabs) - 1, -1, -1):
        start, end = (chunk * heads for chunk in chunks.slabs[number])
        now, on = slice(start, end), chunks.goes_on(number) * heads
        if by_rank is not None:
            gradients[start + on : end] = by_rank[on : end - start]
        updates[now].baddbmm_(local.left[now], gradients[now])
        if number or wants_before:
            direct[now].baddbmm_(local.seen[now].mT, updates[now], alpha=-1)
            earlier = direct[now].addcmul_(gradients[now], local.kept[now])
            if number:
                behind = chunks.slabs[number - 1][0] * heads
                gradients[behind : behind + end - start] = earlier
            else:
                at_start = earlier.unflatten(0, (-1, heads)).index_select(0, chunks.rank)
    return _Return(gradients, updates, at_start)


@contextmanager
def _products_for(x: Tensor) -> Iterator[None]:
    """Multiply half precision in TF32 on CUDA: the error is a quarter of rounding the result to bfloat16."""
    if not half_on_gpu(x.device, x.dtype):
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, chunks, keeps = arguments
        inputs = _Inputs(*tensors)
        out, afters = torch.empty_like(inputs.value, memory_format=torch.contiguous_format), []
        with _products_for(inputs.value):
            for values, mine in inputs.slices(chunks):
                out[:, values], after = _forward(mine, chunks, keeps)
                afters.append(after)
        ctx.chunks, ctx.keeps = chunks, keeps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return out, torch.cat(afters, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_out, d_after = grads
        inputs, wants_before = _Inputs(*ctx.saved_tensors), ctx.needs_input_grad[5]
        d_out = torch.zeros_like(inputs.value) if d_out is None else d_out
        d_after = d_after if ctx.keeps else None
        found: list[Any] = []
        with _products_for(inputs.value):
            for values, mine in inputs.slices(ctx.chunks):
                after = None if d_after is None else d_after[:, values]
                found.append(_backward(mine, after, d_out[:, values], ctx.chunks, wants_before))
        joined = [
            parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, 1)
            for parts in zip(*found, strict=True)
        ]
        return *joined, None, None


def _forward(inputs: _Inputs, chunks: Chunks, keeps: bool) -> tuple[Tensor, Tensor]:
    heads = inputs.value.shape[1]
    local = _local(_spread(inputs, chunks))
    course = _course(local, chunks, heads, inputs.before, keeps)
    out = torch.baddbmm(torch.bmm(local.attended, course.updates), local.query * local.total, course.states)
    return chunks.collect(out, heads), course.after


def _backward(
    inputs: _Inputs, d_after: Tensor | None, d_out: Tensor, chunks: Chunks, wants_before: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value, decay, beta and `before` of some heads."""
    query, key, value, decay, beta, before = inputs
    heads = value.shape[1]
    spread = _spread(inputs, chunks)
    local = _local(spread)
    dtype = local.solved.dtype
    states, updates, _ = _course(local, chunks, heads, before, keeps=False)
    d_o = chunks.spread(d_out).to(dtype)  # [B, size, value_dim]
    d_states, d_updates, d_before = _return(
        local, chunks, heads, d_o, None if d_after is None else d_after.to(dtype), wants_before
    )
    d_q, d_k, d_v, d_decay, d_beta = _gradients(spread, d_o, d_states, d_updates, states, updates, local)
    return (
        _through_unit(query, _sum_groups(chunks.collect(d_q, heads), query.shape[1]) * key.shape[2] ** -0.5),
        _through_unit(key, _sum_groups(chunks.collect(d_k, heads), key.shape[1])),
        chunks.collect(d_v, heads),
        chunks.collect(d_decay, heads)[:, :, 0].to(decay.dtype),
        chunks.collect(d_beta, heads)[:, :, 0].to(beta.dtype),
        d_before,
    )


def _gradients(
    spread: _Spread, d_out: Tensor, d_states: Tensor, d_updates: Tensor, states: Tensor, updates: Tensor, local: _Local
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of unit queries and keys, values, decays and betas of all chunks at once."""
    q, k, dtype = local.query, local.key, local.key.dtype
    v, b = spread.value.to(dtype), spread.beta.to(dtype)
    d_seen = torch.bmm(d_updates, states.mT).neg()  # of W
    # Of β exp(t) k and of β v
    d_right_key, d_right_value = torch.bmm(local.inverse.mT, d_seen), torch.bmm(local.inverse.mT, d_updates)
    d_lower = (torch.bmm(d_right_key, local.seen.mT) + torch.bmm(d_right_value, local.solved.mT)).neg().tril(-1)
    d_read = torch.bmm(d_out, states.mT)  # of exp(t) q
    d_left = torch.bmm(updates, d_states.mT)  # of R
    d_attended = torch.bmm(d_out, updates.mT)  # of P, of which the lower triangle counts

    by_key = _row_sums(d_right_key, k)
    d_beta = by_key * local.total + _row_sums(d_right_value, v) + _row_sums(local.similar, d_lower)
    d_decayed = d_lower * local.similar * b + d_attended * local.attended  # of the logarithm of D
    by_rest = _row_sums(d_left, k) * local.rest
    d_t = (by_key * b + _row_sums(d_read, q)) * local.total - by_rest
    d_t = d_t + d_decayed.sum(2, keepdim=True) - d_decayed.sum(1).unsqueeze(2)
    at_end = by_rest.sum(1, keepdim=True) + local.kept * (states * d_states).sum((1, 2)).view(-1, 1, 1)
    d_decay = d_t.flip(1).cumsum(1).flip(1) + at_end  # a decay counts in the t of its own token and of all later ones

    d_dots = d_attended * local.between
    d_lower = d_lower * local.between * b
    d_q = torch.baddbmm(d_read * local.total, d_dots, k)
    d_k = d_right_key * (b * local.total) + d_left * local.rest
    d_k = d_k + torch.bmm(d_dots.mT, q) + torch.bmm(d_lower + d_lower.mT, k)
    return d_q, d_k, (d_right_value * b).to(spread.value.dtype), d_decay, d_beta


def _row_sums(a: Tensor, b: Tensor) -> Tensor:
    sums: Tensor = (a * b).sum(-1, keepdim=True)
    return sums


def _sum_groups(x: Tensor, heads: int) -> Tensor:
    """[tokens, value_heads, dim] -> [tokens, heads, dim], the sum over the value heads of each head."""
    sums: Tensor = x.unflatten(1, (heads, -1)).sum(2)
    return sums


def _through_unit(x: Tensor, d_unit: Tensor) -> Tensor:
    """The gradient of x where d_unit is that of x brought to length one."""
    scale = _inverse_length(x.to(d_unit.dtype))
    unit = x * scale
    gradient: Tensor = (d_unit - unit * _row_sums(unit, d_unit)) * scale
    return gradient.to(x.dtype)
