"""Forward kernels of the gated delta rule, and their launches; `kernels/delta_rule.py` says what they compute."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.kernels.delta_nets import CHUNK

PROGRAMS = 120
"""About an H100's number of multiprocessors (132): from so many programs on, each takes more columns, not fewer."""
ALONE = {"num_warps": 4, "num_stages": 1}
"""Options of kernels that compute all chunks at once. All options are the fastest on an H100 at widths of 128."""
OUTPUT_COLUMNS = 64
"""Columns of values that a program of `_output` takes."""

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels: its matrix products take bfloat16's bits for integers."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Chunks of a packed row."""

    chunks: Tensor
    """[chunks, 2] int32: first token and number of tokens of each chunk, those of a sequence behind one another."""
    sequences: Tensor
    """[sequences, 4] int32: number in the row, first token, tokens and first chunk, the longest first."""


@dataclass(frozen=True, eq=False)
class SomeHeads:
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

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch a kernel with the constants that all are compiled for."""
        groups, key_dim, value_dim = self.heads // self.key.shape[1], self.key.shape[2], self.value.shape[2]
        kernel[grid](*arguments, GROUPS=groups, K=key_dim, V=value_dim, C=CHUNK, **options)

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.value.shape[1]

    @property
    def queries_and_keys(self) -> tuple[Any, ...]:
        """Queries and keys as kernels take them."""
        return *placed(self.query), *placed(self.key)

    @property
    def scale(self) -> float:
        """1 / sqrt(K)."""
        return float(self.key.shape[2] ** -0.5)

    def pairs(self, *shape: int) -> Tensor:
        """Room for a matrix of each chunk and head, in two parts [chunks, heads, 2, ...]."""
        return self.value.new_empty(self.cuts.chunks.shape[0], self.heads, 2, *shape)

    def exact(self, *shape: int) -> Tensor:
        """Room for float32 numbers of each chunk and head [chunks, heads, ...]."""
        return self.value.new_empty(self.cuts.chunks.shape[0], self.heads, *shape, dtype=torch.float32)


def placed(x: Tensor) -> tuple[Any, ...]:
    """A tensor as kernels take it: with what lies between its tokens, and between its heads."""
    return x, *x.stride()[:2]


def prepared(heads: SomeHeads) -> tuple[Tensor, Tensor]:
    """T in two parts [chunks, heads, 2, C, C], and t, β, 1 / |k| and 1 / |q| [chunks, heads, 4, C]."""
    inverses, factors, chunks = heads.pairs(CHUNK, CHUNK), heads.exact(4, CHUNK), heads.cuts.chunks
    gates = (*placed(heads.decay), *placed(heads.beta))
    heads.launch(
        _prepare,
        (len(chunks), heads.heads),
        *heads.queries_and_keys,
        *gates,
        chunks,
        inverses,
        factors,
        heads.heads,
        **ALONE,
    )
    return inverses, factors


def advanced(heads: SomeHeads, inverses: Tensor, factors: Tensor, after: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states before each chunk, and U; the last states are written to `after`.

    They are [chunks, heads, 2, K, V] and [chunks, heads, 2, C, V].
    """
    key_dim, value_dim = heads.key.shape[2], heads.value.shape[2]
    states, updates = heads.pairs(key_dim, value_dim), heads.pairs(CHUNK, value_dim)
    before, ends = (states if given is None else given for given in (heads.before, after))
    options: dict[str, Any] = {"BEGINS": heads.before is None, "KEEPS": after is not None, **_along(heads)}
    sequences = heads.cuts.sequences
    inputs = (*placed(heads.key), *placed(heads.value), inverses, factors, before, sequences)
    grid = (value_dim // options["COLUMNS"], heads.heads, len(sequences))
    heads.launch(_advance, grid, *inputs, states, updates, ends, heads.heads, **options)
    return states, updates


def put_out(heads: SomeHeads, factors: Tensor, states: Tensor, updates: Tensor, out: Tensor) -> None:
    """Write the outputs [tokens, heads, V]."""
    columns, chunks = min(OUTPUT_COLUMNS, heads.value.shape[2]), heads.cuts.chunks
    inputs, sizes = (*heads.queries_and_keys, chunks, factors, states, updates), (heads.heads, heads.scale)
    grid = (heads.value.shape[2] // columns, heads.heads, len(chunks))
    heads.launch(_output, grid, *inputs, *placed(out), *sizes, COLUMNS=columns, **ALONE)


def _along(heads: SomeHeads) -> dict[str, int]:
    """Choose the columns of each program of `_advance`: the fewer programs, the fewer columns, to fill the GPU."""
    value_dim = heads.value.shape[2]
    columns = heads.heads * heads.cuts.sequences.shape[0] * value_dim  # of all states
    wide = 64 if columns >= 2 * PROGRAMS * 64 else 32 if columns >= PROGRAMS * 32 else 16
    return {"COLUMNS": min(wide, value_dim), "num_warps": 4, "num_stages": 3 if wide == 64 else 4}


@triton.jit
def product(a: tl.tensor, b: tl.tensor, added: tl.tensor) -> tl.tensor:
    """The product of bfloat16 matrices, and what is added to it, in float32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), added, input_precision="ieee")
    else:
        return tl.dot(a, b, added)


@triton.jit
def high_and_low(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Float32 numbers as the sum of two bfloat16."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def times_pair(a: tl.tensor, high: tl.tensor, low: tl.tensor) -> tl.tensor:
    """The product of bfloat16 and a pair."""
    return product(a, high, product(a, low, None))


@triton.jit
def pair_times(high: tl.tensor, low: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The product of a pair and bfloat16."""
    return product(high, b, product(low, b, None))


@triton.jit
def pair_times_pair(a_high: tl.tensor, a_low: tl.tensor, b_high: tl.tensor, b_low: tl.tensor) -> tl.tensor:
    """The product of two pairs, but for low times low."""
    return product(a_high, b_high, product(a_high, b_low, product(a_low, b_high, None)))


@triton.jit
def store_pair(place: tl.tensor, apart: tl.constexpr, high: tl.tensor, low: tl.tensor) -> None:
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
    q = tl.load(
        query + token[:, None] * q_token + (head // GROUPS) * q_head + column[None, :], mask=inside[:, None], other=0.0
    )
    k = tl.load(
        key + token[:, None] * k_token + (head // GROUPS) * k_head + column[None, :], mask=inside[:, None], other=0.0
    )
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
    lower = tl.where(i > j, product(k, tl.trans(k), None) * (by_key * b)[:, None] * by_key[None, :] * between, 0.0)
    # The inverses of blocks on the diagonal are joined to those of blocks twice as large, as in
    # `kernels/delta_chunks.py`.
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -lower, 0.0))
    for level in tl.static_range(1, 6):
        below = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level)), lower, 0.0)
        high, low = high_and_low(inverse)
        below_high, below_low = high_and_low(below)
        product_high, product_low = high_and_low(pair_times_pair(high, low, below_high, below_low))
        inverse -= pair_times_pair(product_high, product_low, high, low)
    high, low = high_and_low(inverse)
    store_pair(inverses + place * 2 * C * C + i * C + j, C * C, high, low)


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
        high, low = high_and_low(state)
        store_pair(states + place * 2 * K * V + in_state, K * V, high, low)
        right = (v - times_pair(k, high, low) * (tl.exp(t) * by_key)[:, None]) * b[:, None]
        high, low = high_and_low(right)
        update = pair_times_pair(inverse_high, inverse_low, high, low)
        high, low = high_and_low(update)
        store_pair(updates + place * 2 * C * V + in_chunk, C * V, high, low)
        high, low = high_and_low(update * (tl.exp(t_end - t) * by_key)[:, None])
        state *= tl.exp(t_end)
        state = product(tl.trans(k), low, state)
        state = product(tl.trans(k), high, state)
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
    attended = tl.where(i >= j, product(q, tl.trans(k), None) * by_query[:, None] * by_key[None, :] * between, 0.0)
    state = states + place * 2 * K * V + k_column[:, None] * V + v_column[None, :]
    found = times_pair(q, tl.load(state), tl.load(state + K * V)) * (tl.exp(t) * by_query)[:, None]
    update = updates + place * 2 * C * V + row[:, None] * V + v_column[None, :]
    high, low = high_and_low(attended)
    update_high, update_low = tl.load(update), tl.load(update + C * V)
    found = product(low, update_high, found)
    found = product(high, update_low, found)
    found = product(high, update_high, found)
    tl.store(out + token * out_token + head * out_head + v_column[None, :], found.to(out.dtype.element_ty), mask=inside)
