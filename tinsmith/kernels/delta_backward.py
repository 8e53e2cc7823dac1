"""Backward kernels of the gated delta rule, and their launches; `kernels/delta_rule.py` says what they compute."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tinsmith.kernels.delta_forward import (
    ALONE,
    SomeHeads,
    high_and_low,
    pair_times,
    pair_times_pair,
    placed,
    product,
    store_pair,
    times_pair,
)
from tinsmith.kernels.delta_nets import CHUNK

RETREAT_COLUMNS, ACROSS_COLUMNS = 32, 32
"""Columns of values and of keys that a program takes."""


def retreated(
    heads: SomeHeads,
    inverses: Tensor,
    factors: Tensor,
    d_out: Tensor,
    d_after: Tensor | None,
    d_value: Tensor,
    d_before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of the states after each chunk, and X; those of v go to `d_value`.

    They are [chunks, heads, 2, K, V] and [chunks, heads, 2, C, V].
    """
    key_dim, value_dim = heads.key.shape[2], heads.value.shape[2]
    local = heads.exact(CHUNK, value_dim)
    inputs = (*heads.queries_and_keys, *placed(d_out))
    chunks, sequences = heads.cuts.chunks, heads.cuts.sequences
    sizes = (heads.heads, heads.scale)
    heads.launch(_return, (heads.heads, len(chunks)), *inputs, chunks, factors, local, *sizes, **ALONE)
    d_states, solved = heads.pairs(key_dim, value_dim), heads.pairs(CHUNK, value_dim)
    ends, starts = (d_states if given is None else given for given in (d_after, d_before))
    columns = min(RETREAT_COLUMNS, value_dim)
    grid = (value_dim // columns, heads.heads, len(sequences))
    found = (d_states, solved, *placed(d_value), starts)
    options = {
        "ENDS": d_after is None,
        "KEEPS": d_before is not None,
        "COLUMNS": columns,
        "num_warps": 4,
        "num_stages": 3,
    }
    heads.launch(_retreat, grid, *inputs, inverses, factors, local, ends, sequences, *found, *sizes, **options)
    return d_states, solved


def write_gradients(
    heads: SomeHeads,
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
    chunks, key_heads, key_dim = heads.cuts.chunks, heads.key.shape[1], heads.key.shape[2]
    columns = min(ACROSS_COLUMNS, key_dim)
    parts = key_dim // columns
    matrices = heads.pairs(2, CHUNK, CHUNK)
    sums, ends = heads.exact(2 * (1 + parts), CHUNK), heads.exact(parts)
    rows = heads.value.new_empty(len(chunks), key_heads, 2, CHUNK, key_dim, dtype=torch.float32)
    inputs, outs, sizes = heads.queries_and_keys, placed(d_out), (heads.heads, heads.scale)
    inner = (*placed(heads.value), *outs, chunks, factors, updates, solved, matrices, sums)
    heads.launch(_inside, (heads.heads, len(chunks)), *inputs, *inner, *sizes, PARTS=parts, **ALONE)
    outer = (*outs, chunks, factors, states, updates, d_states, solved, matrices, sums, ends, rows)
    heads.launch(_across, (parts, key_heads, len(chunks)), *inputs, *outer, *sizes, COLUMNS=columns, **ALONE)
    gradients = (d_query, *placed(d_key), d_decay, d_beta, *d_decay.stride())
    heads.launch(
        _finish,
        (key_heads, len(chunks)),
        *inputs,
        chunks,
        sums,
        ends,
        rows,
        *gradients,
        heads.heads,
        PARTS=parts,
        **ALONE,
    )


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
    attended = tl.where(i <= j, product(k, tl.trans(q), None) * by_key[:, None] * by_query[None, :] * between, 0.0)
    high, low = high_and_low(attended)
    tl.store(local + place * C * V + row[:, None] * V + v_column[None, :], pair_times(high, low, d_o))


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
        high, low = high_and_low(d_state)
        store_pair(d_states + place * 2 * K * V + in_state, K * V, high, low)
        d_update += times_pair(k, high, low) * (tl.exp(t_end - t) * by_key)[:, None]
        high, low = high_and_low(d_update)
        x = pair_times_pair(tl.trans(inverse_high), tl.trans(inverse_low), high, low)
        high, low = high_and_low(x)
        store_pair(solved + place * 2 * C * V + in_chunk, C * V, high, low)
        x *= b[:, None]
        tl.store(values + far * v_token, x.to(d_value.dtype.element_ty), mask=inside)
        high, low = high_and_low(d_o * (total * by_query)[:, None])
        d_state *= tl.exp(t_end)
        d_state = product(tl.trans(q), low, d_state)
        d_state = product(tl.trans(q), high, d_state)
        high, low = high_and_low(x * (-total * by_key)[:, None])
        d_state = product(tl.trans(k), low, d_state)
        d_state = product(tl.trans(k), high, d_state)
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
    of_dots = product(d_o, tl.trans(u_high), product(d_o, tl.trans(u_low), None))
    of_dots = tl.where(i >= j, of_dots * between * by_query[:, None] * by_key[None, :], 0.0)
    high, low = high_and_low(of_dots)
    store_pair(square, 2 * C * C, high, low)
    k = tl.load(key + token * k_token + (head // GROUPS) * k_head + k_column[None, :], mask=inside, other=0.0)
    q = tl.load(query + token * q_token + (head // GROUPS) * q_head + k_column[None, :], mask=inside, other=0.0)
    d_decayed = of_dots * product(q, tl.trans(k), None)

    x_high, x_low = tl.load(solved + in_chunk), tl.load(solved + in_chunk + C * V)
    of_dots = pair_times_pair(x_high, x_low, tl.trans(u_high), tl.trans(u_low))
    of_dots = tl.where(i > j, -of_dots * between * by_key[:, None] * by_key[None, :], 0.0)
    part = of_dots * product(k, tl.trans(k), None)
    d_b = tl.sum(part, 1)
    d_decayed += part * b[:, None]
    of_dots *= b[:, None]
    high, low = high_and_low(of_dots + tl.trans(of_dots))
    store_pair(square + C * C, 2 * C * C, high, low)
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
        d_q = product(high, k, product(low, k, d_q))
        d_k = product(tl.trans(high), q, product(tl.trans(low), q, d_k))
        high, low = tl.load(square + C * C), tl.load(square + 3 * C * C)
        d_k = product(high, k, product(low, k, d_k))

        s_high, s_low = tl.load(states + in_state), tl.load(states + in_state + K * V)
        d_o = tl.load(d_out + token * o_token + head * o_head + v_column[None, :], mask=inside, other=0.0)
        part = times_pair(d_o, tl.trans(s_high), tl.trans(s_low)) * (total * by_query)[:, None]
        d_q += part
        d_t = tl.sum(part * q.to(tl.float32), 1)
        high, low = tl.load(solved + in_chunk), tl.load(solved + in_chunk + C * V)
        part = pair_times_pair(high, low, tl.trans(s_high), tl.trans(s_low)) * (-total * by_key)[:, None]
        d_k += part * b[:, None]
        d_b = tl.sum(part * k.to(tl.float32), 1)
        d_t += d_b * b
        e_high, e_low = tl.load(d_states + in_state), tl.load(d_states + in_state + K * V)
        high, low = tl.load(updates + in_chunk), tl.load(updates + in_chunk + C * V)
        part = pair_times_pair(high, low, tl.trans(e_high), tl.trans(e_low)) * (tl.exp(t_end - t) * by_key)[:, None]
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
