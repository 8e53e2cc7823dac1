"""Triton kernels of the gated delta rule for bfloat16 on CUDA, forward and backward, over packed sequences.

They compute what `models/delta_chunks.py` computes, in its notation, in chunks of `CHUNK` tokens. Two kernels walk along the chunks of a
sequence, one forward and one backward, each program with the state of one head and some of its value columns in registers; all others
compute every chunk of every sequence at once. With T = (I + L)⁻¹ and X the gradient of β v:

    prepare      t, β, 1 / |k|, 1 / |q| and T of each chunk
    advance      U = T (β (v - exp(t) k S)), then S' = exp(t_end) S + Rᵀ U
    output       out = exp(t) q S + P U
    return       Pᵀ d_out, what the gradient of U gets from the outputs of its own chunk
    retreat      X = Tᵀ (Pᵀ d_out + R dS'), then dS = exp(t_end) dS' + (exp(t) q)ᵀ d_out - (β exp(t) k)ᵀ X
    inside       what L and P give to the gradients: that of P is d_out Uᵀ, and that of L is -X Uᵀ
    across       what the states before and after a chunk give to them: d_out Sᵀ, -X Sᵀ, which is that of β exp(t) k, and U dS'ᵀ
    finish       the gradients of queries and keys through their length, of decays and of β

Results in bfloat16 are as exact as if all was computed in float32 and rounded at the end. Matrices are multiplied in bfloat16, which keeps
8 bits, so numbers are kept as a pair of bfloat16, a high and a low part, which keep 16. Inputs are bfloat16 as they come: lengths of keys
and queries, β and decays are multiplied in before or after, in float32, so that products of inputs need one pair or none.
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

from tinsmith.models.delta_kernels import CHUNK, STATE_BYTES
from tinsmith.models.device import upload

WIDTHS = (16, 32, 64, 128)
"""Widths of keys and values that the kernels compute."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Chunks of a packed row."""

    chunks: Tensor
    """[chunks, 2] int32: first token and number of tokens of each chunk, those of a sequence behind one another."""
    sequences: Tensor
    """[sequences, 4] int32: number in the row, first token, tokens and first chunk, the longest first."""


@lru_cache(maxsize=16)
def cuts_of(lengths: tuple[int, ...], device: torch.device) -> Cuts:
    """The chunks of a packed row of these sequences. The layers of a pass share the answer."""
    tokens = np.array(lengths)
    counts = -(-tokens // CHUNK)  # [sequences]
    starts, first = np.cumsum(tokens) - tokens, np.cumsum(counts) - counts
    inside = (np.arange(counts.sum()) - np.repeat(first, counts)) * CHUNK  # [chunks]
    chunks = np.stack([np.repeat(starts, counts) + inside, np.minimum(np.repeat(tokens, counts) - inside, CHUNK)], 1)
    sequences = np.stack([np.arange(len(tokens)), starts, tokens, first], 1)[np.argsort(-tokens, kind="stable")]
    return Cuts(upload(chunks.astype(np.int32), device), upload(sequences.astype(np.int32), device))


def serves(key: Tensor, value: Tensor) -> bool:
    """Whether the kernels compute heads of this kind: key [tokens, key_heads, key_dim], value [tokens, value_heads, value_dim]."""
    return value.dtype == key.dtype == torch.bfloat16 and key.shape[2] in WIDTHS and value.shape[2] in WIDTHS


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    before: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of `models/delta_rule.py`. Unless `keeps`, the states are an empty tensor."""
    compute: Callable[..., tuple[Tensor, Tensor]] = _DeltaRuleOnKernels.apply
    return compute(query, key, value, decay, beta, before, cuts_of(lengths, value.device), keeps)


@dataclass(frozen=True, eq=False)
class _SomeHeads:
    """The inputs of some heads, and how they are cut."""

    query: Tensor
    """[tokens, key_heads, key_dim], as the key; the last dimension of all of them is dense."""
    key: Tensor
    value: Tensor
    """[tokens, value_heads, value_dim]"""
    decay: Tensor
    """[tokens, value_heads], as beta"""
    beta: Tensor
    before: Tensor | None
    """[sequences, value_heads, key_dim, value_dim] float32"""
    cuts: Cuts

    @property
    def shape(self) -> dict[str, int]:
        """The constants that every kernel is compiled for."""
        key_heads, value_heads = self.key.shape[1], self.value.shape[1]
        return {"GROUPS": value_heads // key_heads, "K": self.key.shape[2], "V": self.value.shape[2], "C": CHUNK}

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.value.shape[1]

    def pairs(self, *shape: int) -> Tensor:
        """Room for a matrix of each chunk and head, in two parts [chunks, heads, 2, ...]."""
        return self.value.new_empty(self.cuts.chunks.shape[0], self.heads, 2, *shape)

    def exact(self, *shape: int) -> Tensor:
        """Room for float32 numbers of each chunk and head [chunks, heads, ...]."""
        return self.value.new_empty(self.cuts.chunks.shape[0], self.heads, *shape, dtype=torch.float32)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _slices(inputs: tuple[Any, ...], cuts: Cuts) -> list[tuple[slice, slice, _SomeHeads]]:
    """The inputs in slices of key heads and of value heads that `STATE_BYTES` allows."""
    query, key, value, decay, beta, before = inputs
    key_heads, key_dim = key.shape[1:]
    value_heads, value_dim = value.shape[1:]
    groups = value_heads // key_heads
    many = max(1, min(key_heads, STATE_BYTES // (cuts.chunks.shape[0] * groups * key_dim * value_dim * 4)))
    found = []
    for first in range(0, key_heads, many):
        keys, values = slice(first, first + many), slice(first * groups, (first + many) * groups)
        mine = None if before is None else before[:, values].float().contiguous()
        found.append(
            (keys, values, _SomeHeads(query[:, keys], key[:, keys], value[:, values], decay[:, values], beta[:, values], mine, cuts))
        )
    return found


class _DeltaRuleOnKernels(torch.autograd.Function):
    """Keeps its inputs alone for the backward, which computes the forward's states again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, cuts, keeps = arguments
        query, key, value, decay, beta, before = tensors
        inputs = (_dense(query), _dense(key), _dense(value), decay, beta, before)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        shape = (cuts.sequences.shape[0], value.shape[1], key.shape[2], value.shape[2]) if keeps else (0, 0)
        after = torch.empty(shape, dtype=torch.float32, device=value.device)
        slices = _slices(inputs, cuts)
        for _, values, mine in slices:
            inverses, factors = _prepared(mine)
            ends = after[:, values] if keeps else None
            ends = ends if ends is None or ends.is_contiguous() else torch.empty_like(ends, memory_format=torch.contiguous_format)
            states, updates = _advanced(mine, inverses, factors, ends)
            if ends is not None and len(slices) > 1:
                after[:, values] = ends
            _put_out(mine, factors, states, updates, out[:, values])
        ctx.cuts, ctx.keeps = cuts, keeps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return out, after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_out, d_after = grads
        inputs = ctx.saved_tensors
        value, before = inputs[2], inputs[5]
        d_out = torch.zeros_like(value) if d_out is None else _dense(d_out.to(value.dtype))
        d_after = d_after if ctx.keeps else None
        d_query, d_key, d_value, d_decay, d_beta = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:5])
        wants_before = before is not None and ctx.needs_input_grad[5]
        d_before: Tensor | None = None
        slices = _slices(inputs, ctx.cuts)
        if wants_before:
            d_before = torch.empty_like(before, memory_format=torch.contiguous_format)
        for keys, values, mine in slices:
            inverses, factors = _prepared(mine)
            states, updates = _advanced(mine, inverses, factors, None)
            behind = None if d_after is None else d_after[:, values].float().contiguous()
            start = torch.empty_like(mine.before) if wants_before and mine.before is not None else None
            d_states, solved = _retreated(mine, inverses, factors, d_out[:, values], behind, d_value[:, values], start)
            del inverses
            if d_before is not None:
                assert start is not None
                d_before[:, values] = start.to(d_before.dtype)
            targets = (d_query[:, keys], d_key[:, keys], d_decay[:, values], d_beta[:, values])
            _gradients_of(mine, factors, states, updates, d_out[:, values], d_states, solved, targets)
        return d_query, d_key, d_value, d_decay, d_beta, d_before, None, None


def _prepared(heads: _SomeHeads) -> tuple[Tensor, Tensor]:
    """T in two parts [chunks, heads, 2, C, C], and t, β, 1 / |k| and 1 / |q| [chunks, heads, 4, C]."""
    inverses, factors = heads.pairs(CHUNK, CHUNK), heads.exact(4, CHUNK)
    launch: Any = _prepare
    launch[(heads.cuts.chunks.shape[0], heads.heads)](
        heads.query,
        *heads.query.stride()[:2],
        heads.key,
        *heads.key.stride()[:2],
        heads.decay,
        *heads.decay.stride(),
        heads.beta,
        *heads.beta.stride(),
        heads.cuts.chunks,
        inverses,
        factors,
        heads.heads,
        **heads.shape,
        **PREPARE,
    )
    return inverses, factors


def _advanced(heads: _SomeHeads, inverses: Tensor, factors: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk [chunks, heads, 2, K, V] and U [chunks, heads, 2, C, V]; the last states are written to `after`."""
    key_dim, value_dim = heads.key.shape[2], heads.value.shape[2]
    states, updates = heads.pairs(key_dim, value_dim), heads.pairs(CHUNK, value_dim)
    launch: Any = _advance
    options = _along(heads)
    launch[(value_dim // options["COLUMNS"], heads.heads, heads.cuts.sequences.shape[0])](
        heads.key,
        *heads.key.stride()[:2],
        heads.value,
        *heads.value.stride()[:2],
        inverses,
        factors,
        states if heads.before is None else heads.before,
        heads.cuts.sequences,
        states,
        updates,
        states if after is None else after,
        heads.heads,
        **heads.shape,
        BEGINS=heads.before is None,
        KEEPS=after is not None,
        **options,
    )
    return states, updates


def _put_out(heads: _SomeHeads, factors: Tensor, states: Tensor, updates: Tensor, out: Tensor) -> None:
    """Write the outputs [tokens, heads, V]."""
    launch: Any = _output
    columns = min(OUTPUT_COLUMNS, heads.value.shape[2])
    launch[(heads.value.shape[2] // columns, heads.heads, heads.cuts.chunks.shape[0])](
        heads.query,
        *heads.query.stride()[:2],
        heads.key,
        *heads.key.stride()[:2],
        heads.cuts.chunks,
        factors,
        states,
        updates,
        out,
        *out.stride()[:2],
        heads.heads,
        heads.key.shape[2] ** -0.5,
        **heads.shape,
        COLUMNS=columns,
        **OUTPUT,
    )


def _retreated(
    heads: _SomeHeads,
    inverses: Tensor,
    factors: Tensor,
    d_out: Tensor,
    d_after: Tensor | None,
    d_value: Tensor,
    d_before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after each chunk [chunks, heads, 2, K, V], and X [chunks, heads, 2, C, V]; those of v are written."""
    key_dim, value_dim = heads.key.shape[2], heads.value.shape[2]
    scale = key_dim**-0.5
    local = heads.exact(CHUNK, value_dim)
    launch: Any = _return
    launch[(heads.heads, heads.cuts.chunks.shape[0])](
        heads.query,
        *heads.query.stride()[:2],
        heads.key,
        *heads.key.stride()[:2],
        d_out,
        *d_out.stride()[:2],
        heads.cuts.chunks,
        factors,
        local,
        heads.heads,
        scale,
        **heads.shape,
        **RETURN,
    )
    d_states, solved = heads.pairs(key_dim, value_dim), heads.pairs(CHUNK, value_dim)
    launch = _retreat
    columns = min(RETREAT_COLUMNS, value_dim)
    launch[(value_dim // columns, heads.heads, heads.cuts.sequences.shape[0])](
        heads.query,
        *heads.query.stride()[:2],
        heads.key,
        *heads.key.stride()[:2],
        d_out,
        *d_out.stride()[:2],
        inverses,
        factors,
        local,
        d_states if d_after is None else d_after,
        heads.cuts.sequences,
        d_states,
        solved,
        d_value,
        *d_value.stride()[:2],
        d_states if d_before is None else d_before,
        heads.heads,
        scale,
        **heads.shape,
        ENDS=d_after is None,
        KEEPS=d_before is not None,
        COLUMNS=columns,
        **RETREAT,
    )
    return d_states, solved


def _gradients_of(
    heads: _SomeHeads,
    factors: Tensor,
    states: Tensor,
    updates: Tensor,
    d_out: Tensor,
    d_states: Tensor,
    solved: Tensor,
    targets: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of query, key, decay and beta."""
    d_query, d_key, d_decay, d_beta = targets
    chunks, key_heads, key_dim = heads.cuts.chunks.shape[0], heads.key.shape[1], heads.key.shape[2]
    scale = key_dim**-0.5
    columns = min(ACROSS_COLUMNS, key_dim)
    parts = key_dim // columns
    matrices = heads.pairs(2, CHUNK, CHUNK)
    sums, ends = heads.exact(2 * (1 + parts), CHUNK), heads.exact(parts)
    rows = heads.value.new_empty(chunks, key_heads, 2, CHUNK, key_dim, dtype=torch.float32)
    inputs = (heads.query, *heads.query.stride()[:2], heads.key, *heads.key.stride()[:2])
    outs = (d_out, *d_out.stride()[:2])
    launch: Any = _inside
    launch[(heads.heads, chunks)](
        *inputs,
        heads.value,
        *heads.value.stride()[:2],
        *outs,
        heads.cuts.chunks,
        factors,
        updates,
        solved,
        matrices,
        sums,
        heads.heads,
        scale,
        **heads.shape,
        PARTS=parts,
        **INSIDE,
    )
    launch = _across
    launch[(parts, key_heads, chunks)](
        *inputs,
        *outs,
        heads.cuts.chunks,
        factors,
        states,
        updates,
        d_states,
        solved,
        matrices,
        sums,
        ends,
        rows,
        heads.heads,
        scale,
        **heads.shape,
        COLUMNS=columns,
        **ACROSS,
    )
    launch = _finish
    launch[(key_heads, chunks)](
        *inputs,
        heads.cuts.chunks,
        sums,
        ends,
        rows,
        d_query,
        d_key,
        *d_key.stride()[:2],
        d_decay,
        d_beta,
        *d_decay.stride(),
        heads.heads,
        **heads.shape,
        PARTS=parts,
        **FINISH,
    )


def _along(heads: _SomeHeads) -> dict[str, int]:
    """Choose the columns of each program of `_advance`: the fewer programs there are, the fewer columns, so that they fill the GPU."""
    value_dim = heads.value.shape[2]
    columns = heads.heads * heads.cuts.sequences.shape[0] * value_dim  # of all states
    wide = 64 if columns >= 2 * PROGRAMS * 64 else 32 if columns >= PROGRAMS * 32 else 16
    return {"COLUMNS": min(wide, value_dim), "num_warps": 4, "num_stages": 3 if wide == 64 else 4}


PROGRAMS = 120
"""About as many as an H100 has multiprocessors (132): from so many programs on one of them has more columns to compute, not fewer."""
# What was fastest on an H100 with keys and values of 128.
PREPARE = {"num_warps": 4, "num_stages": 1}
OUTPUT = {"num_warps": 4, "num_stages": 1}
RETURN = {"num_warps": 4, "num_stages": 1}
RETREAT = {"num_warps": 4, "num_stages": 3}
INSIDE = {"num_warps": 4, "num_stages": 1}
ACROSS = {"num_warps": 4, "num_stages": 1}
FINISH = {"num_warps": 4, "num_stages": 1}
OUTPUT_COLUMNS, RETREAT_COLUMNS, ACROSS_COLUMNS = 64, 32, 32
"""Columns of values, of values and of keys that a program takes."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels: it takes the bits of bfloat16 for integers when it multiplies matrices."""


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, added: tl.tensor) -> tl.tensor:
    """The product of bfloat16 matrices, and what is added to it, in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), added, input_precision="ieee")
    else:
        return tl.dot(a, b, added)


@triton.jit
def _high_and_low(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Float32 numbers as the sum of two bfloat16."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _times_pair(a: tl.tensor, high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The product of bfloat16 and a pair."""
    return _product(a, high, _product(a, low, None))


@triton.jit
def _pair_times(high: tl.tensor, low: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The product of a pair and bfloat16."""
    return _product(high, b, _product(low, b, None))


@triton.jit
def _pair_times_pair(a_high: tl.tensor, a_low: tl.tensor, b_high: tl.tensor, b_low: tl.tensor) -> tl.tensor:
    """The product of two pairs, but for low times low."""
    return _product(a_high, b_high, _product(a_high, b_low, _product(a_low, b_high, None)))


@triton.jit
def _store_pair(place: tl.tensor, apart: tl.constexpr, high: tl.tensor, low: tl.tensor) -> None:
    """Store both parts, `apart` numbers between them."""
    tl.store(place, high)
    tl.store(place + apart, low)


@triton.jit
def _prepare(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    decay: tl.tensor,
    decay_token: tl.tensor,
    decay_head: tl.tensor,
    beta: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    chunks: tl.tensor,
    inverses: tl.tensor,
    factors: tl.tensor,
    heads: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """One chunk of one head."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * chunk).to(tl.int64)
    row = tl.arange(0, C)
    inside = row < tl.load(chunks + 2 * chunk + 1)
    column = tl.arange(0, K)
    token = first + row
    q = tl.load(query + token[:, None] * q_token + (head // GROUPS) * q_head + column[None, :], mask=inside[:, None], other=0.0)
    k = tl.load(key + token[:, None] * k_token + (head // GROUPS) * k_head + column[None, :], mask=inside[:, None], other=0.0)
    wide = q.to(tl.float32)
    by_query = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    wide = k.to(tl.float32)
    by_key = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) + 1e-6)
    b = tl.load(beta + token * beta_token + head * beta_head, mask=inside, other=0.0).to(tl.float32)
    t = tl.cumsum(tl.load(decay + token * decay_token + head * decay_head, mask=inside, other=0.0).to(tl.float32), 0)
    place = chunk.to(tl.int64) * heads + head
    mine = factors + place * 4 * C + row
    tl.store(mine, t)
    tl.store(mine + C, b)
    tl.store(mine + 2 * C, by_key)
    tl.store(mine + 3 * C, by_query)

    i, j = row[:, None], row[None, :]
    between = tl.exp(tl.where(i > j, t[:, None] - t[None, :], 0.0))
    lower = tl.where(i > j, _product(k, tl.trans(k), None) * (by_key * b)[:, None] * by_key[None, :] * between, 0.0)
    # The inverses of blocks on the diagonal are joined to those of blocks twice as large, as in `models/delta_chunks.py`.
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))
    for level in tl.static_range(1, 6):
        below = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level)), lower, 0.0)
        high, low = _high_and_low(inverse)
        below_high, below_low = _high_and_low(below)
        product_high, product_low = _high_and_low(_pair_times_pair(high, low, below_high, below_low))
        inverse -= _pair_times_pair(product_high, product_low, high, low)
    high, low = _high_and_low(inverse)
    _store_pair(inverses + place * 2 * C * C + i * C + j, C * C, high, low)


@triton.jit
def _advance(
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    value: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    inverses: tl.tensor,
    factors: tl.tensor,
    before: tl.tensor,
    sequences: tl.tensor,
    states: tl.tensor,
    updates: tl.tensor,
    after: tl.tensor,
    heads: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BEGINS: tl.constexpr,
    KEEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one head of one sequence."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    own = tl.load(sequences + 4 * sequence).to(tl.int64)
    first = tl.load(sequences + 4 * sequence + 1).to(tl.int64)
    length = tl.load(sequences + 4 * sequence + 2)
    first_chunk = tl.load(sequences + 4 * sequence + 3).to(tl.int64)
    row, k_column = tl.arange(0, C), tl.arange(0, K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    square = row[:, None] * C + row[None, :]
    in_state = k_column[:, None] * V + v_column[None, :]
    in_chunk = row[:, None] * V + v_column[None, :]
    keys = key + row[:, None] * k_token + (head // GROUPS) * k_head + k_column[None, :]
    values = value + row[:, None] * v_token + head * v_head + v_column[None, :]
    if BEGINS:
        state = tl.zeros((K, COLUMNS), tl.float32)
    else:
        state = tl.load(before + (own * heads + head) * K * V + in_state)
    for number in range(tl.cdiv(length, C)):
        place = (first_chunk + number) * heads + head
        inside = (row < length - number * C)[:, None]
        k = tl.load(keys + (first + number * C) * k_token, mask=inside, other=0.0)
        v = tl.load(values + (first + number * C) * v_token, mask=inside, other=0.0).to(tl.float32)
        mine = factors + place * 4 * C
        t = tl.load(mine + row)
        b = tl.load(mine + C + row)
        by_key = tl.load(mine + 2 * C + row)
        t_end = tl.load(mine + C - 1)
        inverse_high = tl.load(inverses + place * 2 * C * C + square)
        inverse_low = tl.load(inverses + place * 2 * C * C + C * C + square)
        high, low = _high_and_low(state)
        _store_pair(states + place * 2 * K * V + in_state, K * V, high, low)
        right = (v - _times_pair(k, high, low) * (tl.exp(t) * by_key)[:, None]) * b[:, None]
        high, low = _high_and_low(right)
        update = _pair_times_pair(inverse_high, inverse_low, high, low)
        high, low = _high_and_low(update)
        _store_pair(updates + place * 2 * C * V + in_chunk, C * V, high, low)
        high, low = _high_and_low(update * (tl.exp(t_end - t) * by_key)[:, None])
        state *= tl.exp(t_end)
        state = _product(tl.trans(k), low, state)
        state = _product(tl.trans(k), high, state)
    if KEEPS:
        tl.store(after + (own * heads + head) * K * V + in_state, state)


@triton.jit
def _output(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    chunks: tl.tensor,
    factors: tl.tensor,
    states: tl.tensor,
    updates: tl.tensor,
    out: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one chunk of one head."""
    head, chunk = tl.program_id(1), tl.program_id(2)
    first = tl.load(chunks + 2 * chunk).to(tl.int64)
    row, k_column = tl.arange(0, C), tl.arange(0, K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tl.load(chunks + 2 * chunk + 1))[:, None]
    token = (first + row)[:, None]
    q = tl.load(query + token * q_token + (head // GROUPS) * q_head + k_column[None, :], mask=inside, other=0.0)
    k = tl.load(key + token * k_token + (head // GROUPS) * k_head + k_column[None, :], mask=inside, other=0.0)
    place = chunk.to(tl.int64) * heads + head
    mine = factors + place * 4 * C + row
    t = tl.load(mine)
    by_key = tl.load(mine + 2 * C)
    by_query = tl.load(mine + 3 * C) * scale
    i, j = row[:, None], row[None, :]
    between = tl.exp(tl.where(i >= j, t[:, None] - t[None, :], 0.0))
    attended = tl.where(i >= j, _product(q, tl.trans(k), None) * by_query[:, None] * by_key[None, :] * between, 0.0)
    state = states + place * 2 * K * V + k_column[:, None] * V + v_column[None, :]
    found = _times_pair(q, tl.load(state), tl.load(state + K * V)) * (tl.exp(t) * by_query)[:, None]
    update = updates + place * 2 * C * V + row[:, None] * V + v_column[None, :]
    high, low = _high_and_low(attended)
    update_high, update_low = tl.load(update), tl.load(update + C * V)
    found = _product(low, update_high, found)
    found = _product(high, update_low, found)
    found = _product(high, update_high, found)
    tl.store(out + token * out_token + head * out_head + v_column[None, :], found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _return(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    d_out: tl.tensor,
    o_token: tl.tensor,
    o_head: tl.tensor,
    chunks: tl.tensor,
    factors: tl.tensor,
    local: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """One chunk of one head."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * chunk).to(tl.int64)
    row, k_column, v_column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    inside = (row < tl.load(chunks + 2 * chunk + 1))[:, None]
    token = (first + row)[:, None]
    q = tl.load(query + token * q_token + (head // GROUPS) * q_head + k_column[None, :], mask=inside, other=0.0)
    k = tl.load(key + token * k_token + (head // GROUPS) * k_head + k_column[None, :], mask=inside, other=0.0)
    d_o = tl.load(d_out + token * o_token + head * o_head + v_column[None, :], mask=inside, other=0.0)
    place = chunk.to(tl.int64) * heads + head
    mine = factors + place * 4 * C + row
    t = tl.load(mine)
    by_key = tl.load(mine + 2 * C)
    by_query = tl.load(mine + 3 * C) * scale
    i, j = row[:, None], row[None, :]  # i is the token that reads, in a column here: the transpose of P is computed
    between = tl.exp(tl.where(i <= j, t[None, :] - t[:, None], 0.0))
    attended = tl.where(i <= j, _product(k, tl.trans(q), None) * by_key[:, None] * by_query[None, :] * between, 0.0)
    high, low = _high_and_low(attended)
    tl.store(local + place * C * V + row[:, None] * V + v_column[None, :], _pair_times(high, low, d_o))


@triton.jit
def _retreat(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    d_out: tl.tensor,
    o_token: tl.tensor,
    o_head: tl.tensor,
    inverses: tl.tensor,
    factors: tl.tensor,
    local: tl.tensor,
    d_after: tl.tensor,
    sequences: tl.tensor,
    d_states: tl.tensor,
    solved: tl.tensor,
    d_value: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    d_before: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    ENDS: tl.constexpr,
    KEEPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one head of one sequence, from its end to its start."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    own = tl.load(sequences + 4 * sequence).to(tl.int64)
    first = tl.load(sequences + 4 * sequence + 1).to(tl.int64)
    length = tl.load(sequences + 4 * sequence + 2)
    first_chunk = tl.load(sequences + 4 * sequence + 3).to(tl.int64)
    row, k_column = tl.arange(0, C), tl.arange(0, K)
    v_column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    square = row[:, None] * C + row[None, :]
    in_state = k_column[:, None] * V + v_column[None, :]
    in_chunk = row[:, None] * V + v_column[None, :]
    queries = query + row[:, None] * q_token + (head // GROUPS) * q_head + k_column[None, :]
    keys = key + row[:, None] * k_token + (head // GROUPS) * k_head + k_column[None, :]
    outs = d_out + row[:, None] * o_token + head * o_head + v_column[None, :]
    values = d_value + row[:, None] * v_token + head * v_head + v_column[None, :]
    if ENDS:
        d_state = tl.zeros((K, COLUMNS), tl.float32)
    else:
        d_state = tl.load(d_after + (own * heads + head) * K * V + in_state)
    count = tl.cdiv(length, C)
    for step in range(count):
        number = count - 1 - step
        place = (first_chunk + number) * heads + head
        inside = (row < length - number * C)[:, None]
        far = first + number * C
        q = tl.load(queries + far * q_token, mask=inside, other=0.0)
        k = tl.load(keys + far * k_token, mask=inside, other=0.0)
        d_o = tl.load(outs + far * o_token, mask=inside, other=0.0).to(tl.float32)
        mine = factors + place * 4 * C
        t = tl.load(mine + row)
        b = tl.load(mine + C + row)
        by_key = tl.load(mine + 2 * C + row)
        by_query = tl.load(mine + 3 * C + row) * scale
        t_end = tl.load(mine + C - 1)
        inverse_high = tl.load(inverses + place * 2 * C * C + square)
        inverse_low = tl.load(inverses + place * 2 * C * C + C * C + square)
        d_update = tl.load(local + place * C * V + in_chunk)
        total = tl.exp(t)
        high, low = _high_and_low(d_state)
        _store_pair(d_states + place * 2 * K * V + in_state, K * V, high, low)
        d_update += _times_pair(k, high, low) * (tl.exp(t_end - t) * by_key)[:, None]
        high, low = _high_and_low(d_update)
        x = _pair_times_pair(tl.trans(inverse_high), tl.trans(inverse_low), high, low)
        high, low = _high_and_low(x)
        _store_pair(solved + place * 2 * C * V + in_chunk, C * V, high, low)
        x *= b[:, None]
        tl.store(values + far * v_token, x.to(d_value.dtype.element_ty), mask=inside)
        high, low = _high_and_low(d_o * (total * by_query)[:, None])
        d_state *= tl.exp(t_end)
        d_state = _product(tl.trans(q), low, d_state)
        d_state = _product(tl.trans(q), high, d_state)
        high, low = _high_and_low(x * (-total * by_key)[:, None])
        d_state = _product(tl.trans(k), low, d_state)
        d_state = _product(tl.trans(k), high, d_state)
    if KEEPS:
        tl.store(d_before + (own * heads + head) * K * V + in_state, d_state)


@triton.jit
def _inside(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    value: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    d_out: tl.tensor,
    o_token: tl.tensor,
    o_head: tl.tensor,
    chunks: tl.tensor,
    factors: tl.tensor,
    updates: tl.tensor,
    solved: tl.tensor,
    matrices: tl.tensor,
    sums: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One chunk of one head."""
    head, chunk = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * chunk).to(tl.int64)
    row, k_column, v_column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    inside = (row < tl.load(chunks + 2 * chunk + 1))[:, None]
    token = (first + row)[:, None]
    i, j = row[:, None], row[None, :]
    place = chunk.to(tl.int64) * heads + head
    mine = factors + place * 4 * C + row
    t = tl.load(mine)
    b = tl.load(mine + C)
    by_key = tl.load(mine + 2 * C)
    by_query = tl.load(mine + 3 * C) * scale
    between = tl.exp(tl.where(i >= j, t[:, None] - t[None, :], 0.0))
    in_chunk = place * 2 * C * V + row[:, None] * V + v_column[None, :]
    square = matrices + place * 4 * C * C + i * C + j
    u_high, u_low = tl.load(updates + in_chunk), tl.load(updates + in_chunk + C * V)

    d_o = tl.load(d_out + token * o_token + head * o_head + v_column[None, :], mask=inside, other=0.0)
    of_dots = _product(d_o, tl.trans(u_high), _product(d_o, tl.trans(u_low), None))
    of_dots = tl.where(i >= j, of_dots * between * by_query[:, None] * by_key[None, :], 0.0)
    high, low = _high_and_low(of_dots)
    _store_pair(square, 2 * C * C, high, low)
    k = tl.load(key + token * k_token + (head // GROUPS) * k_head + k_column[None, :], mask=inside, other=0.0)
    q = tl.load(query + token * q_token + (head // GROUPS) * q_head + k_column[None, :], mask=inside, other=0.0)
    d_decayed = of_dots * _product(q, tl.trans(k), None)

    x_high, x_low = tl.load(solved + in_chunk), tl.load(solved + in_chunk + C * V)
    of_dots = _pair_times_pair(x_high, x_low, tl.trans(u_high), tl.trans(u_low))
    of_dots = tl.where(i > j, -of_dots * between * by_key[:, None] * by_key[None, :], 0.0)
    part = of_dots * _product(k, tl.trans(k), None)
    d_b = tl.sum(part, 1)
    d_decayed += part * b[:, None]
    of_dots *= b[:, None]
    high, low = _high_and_low(of_dots + tl.trans(of_dots))
    _store_pair(square + C * C, 2 * C * C, high, low)
    v = tl.load(value + token * v_token + head * v_head + v_column[None, :], mask=inside, other=0.0).to(tl.float32)
    d_b += tl.sum((x_high.to(tl.float32) + x_low.to(tl.float32)) * v, 1)
    found = sums + place * 2 * (1 + PARTS) * C + row
    tl.store(found, tl.sum(d_decayed, 1) - tl.sum(d_decayed, 0))
    tl.store(found + C, d_b)


@triton.jit
def _across(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    d_out: tl.tensor,
    o_token: tl.tensor,
    o_head: tl.tensor,
    chunks: tl.tensor,
    factors: tl.tensor,
    states: tl.tensor,
    updates: tl.tensor,
    d_states: tl.tensor,
    solved: tl.tensor,
    matrices: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    scale: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Some columns of one chunk of one key head, for the value heads that share it."""
    part_of_key, key_head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(chunks + 2 * chunk).to(tl.int64)
    row, v_column = tl.arange(0, C), tl.arange(0, V)
    k_column = part_of_key * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < tl.load(chunks + 2 * chunk + 1))[:, None]
    token = (first + row)[:, None]
    q = tl.load(query + token * q_token + key_head * q_head + k_column[None, :], mask=inside, other=0.0)
    k = tl.load(key + token * k_token + key_head * k_head + k_column[None, :], mask=inside, other=0.0)
    d_q = tl.zeros((C, COLUMNS), tl.float32)
    d_k = tl.zeros((C, COLUMNS), tl.float32)
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk.to(tl.int64) * heads + head
        mine = factors + place * 4 * C + row
        t = tl.load(mine)
        b = tl.load(mine + C)
        by_key = tl.load(mine + 2 * C)
        by_query = tl.load(mine + 3 * C) * scale
        t_end = tl.load(factors + place * 4 * C + C - 1)
        total = tl.exp(t)
        in_chunk = place * 2 * C * V + row[:, None] * V + v_column[None, :]
        in_state = place * 2 * K * V + k_column[:, None] * V + v_column[None, :]
        square = matrices + place * 4 * C * C + row[:, None] * C + row[None, :]

        high, low = tl.load(square), tl.load(square + 2 * C * C)
        d_q = _product(high, k, _product(low, k, d_q))
        d_k = _product(tl.trans(high), q, _product(tl.trans(low), q, d_k))
        high, low = tl.load(square + C * C), tl.load(square + 3 * C * C)
        d_k = _product(high, k, _product(low, k, d_k))

        s_high, s_low = tl.load(states + in_state), tl.load(states + in_state + K * V)
        d_o = tl.load(d_out + token * o_token + head * o_head + v_column[None, :], mask=inside, other=0.0)
        part = _times_pair(d_o, tl.trans(s_high), tl.trans(s_low)) * (total * by_query)[:, None]
        d_q += part
        d_t = tl.sum(part * q.to(tl.float32), 1)
        high, low = tl.load(solved + in_chunk), tl.load(solved + in_chunk + C * V)
        part = _pair_times_pair(high, low, tl.trans(s_high), tl.trans(s_low)) * (-total * by_key)[:, None]
        d_k += part * b[:, None]
        d_b = tl.sum(part * k.to(tl.float32), 1)
        d_t += d_b * b
        e_high, e_low = tl.load(d_states + in_state), tl.load(d_states + in_state + K * V)
        high, low = tl.load(updates + in_chunk), tl.load(updates + in_chunk + C * V)
        part = _pair_times_pair(high, low, tl.trans(e_high), tl.trans(e_low)) * (tl.exp(t_end - t) * by_key)[:, None]
        d_k += part
        left = tl.sum(part * k.to(tl.float32), 1)
        both = (s_high.to(tl.float32) + s_low.to(tl.float32)) * (e_high.to(tl.float32) + e_low.to(tl.float32))
        parts: tl.constexpr = K // COLUMNS
        found = sums + (place * 2 * (1 + parts) + 2 * (1 + part_of_key)) * C + row
        tl.store(found, d_t - left)
        tl.store(found + C, d_b)
        tl.store(ends + place * parts + part_of_key, tl.sum(left, 0) + tl.exp(t_end) * tl.sum(tl.sum(both, 1), 0))
    own = rows + (chunk.to(tl.int64) * (heads // GROUPS) + key_head) * 2 * C * K + row[:, None] * K + k_column[None, :]
    tl.store(own, d_q)
    tl.store(own + C * K, d_k)


@triton.jit
def _finish(
    query: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    chunks: tl.tensor,
    sums: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    d_query: tl.tensor,
    d_key: tl.tensor,
    d_token: tl.tensor,
    d_head: tl.tensor,
    d_decay: tl.tensor,
    d_beta: tl.tensor,
    beta_token: tl.tensor,
    beta_head: tl.tensor,
    heads: tl.tensor,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One chunk of one key head, and of the value heads that share it."""
    key_head, chunk = tl.program_id(0), tl.program_id(1)
    first = tl.load(chunks + 2 * chunk).to(tl.int64)
    row, column = tl.arange(0, C), tl.arange(0, K)
    inside = row < tl.load(chunks + 2 * chunk + 1)
    token = first + row
    own = rows + (chunk.to(tl.int64) * (heads // GROUPS) + key_head) * 2 * C * K + row[:, None] * K + column[None, :]
    target = token[:, None] * d_token + key_head * d_head + column[None, :]
    q = tl.load(query + token[:, None] * q_token + key_head * q_head + column[None, :], mask=inside[:, None], other=0.0)
    found = _through_unit(q.to(tl.float32), tl.load(own))
    tl.store(d_query + target, found.to(d_query.dtype.element_ty), mask=inside[:, None])
    k = tl.load(key + token[:, None] * k_token + key_head * k_head + column[None, :], mask=inside[:, None], other=0.0)
    found = _through_unit(k.to(tl.float32), tl.load(own + C * K))
    tl.store(d_key + target, found.to(d_key.dtype.element_ty), mask=inside[:, None])
    for group in range(GROUPS):
        head = key_head * GROUPS + group
        place = chunk.to(tl.int64) * heads + head
        mine = sums + place * 2 * (1 + PARTS) * C + row
        d_t, d_b, at_end = tl.load(mine), tl.load(mine + C), 0.0
        for part in tl.static_range(PARTS):
            d_t += tl.load(mine + 2 * (1 + part) * C)
            d_b += tl.load(mine + (2 * (1 + part) + 1) * C)
            at_end += tl.load(ends + place * PARTS + part)
        d_t = tl.cumsum(d_t, 0, reverse=True) + at_end  # a decay counts in the t of its own token and of all later ones
        of_token = token * beta_token + head * beta_head
        tl.store(d_decay + of_token, d_t.to(d_decay.dtype.element_ty), mask=inside)
        tl.store(d_beta + of_token, d_b.to(d_beta.dtype.element_ty), mask=inside)


@triton.jit
def _through_unit(x: tl.tensor, found: tl.tensor) -> tl.tensor:
    """The gradient of x, where `found` is that of x at length one over the length of x."""
    squares = tl.sum(x * x, 1) + 1e-6
    return found - x * (tl.sum(x * found, 1) / squares)[:, None]
