"""Triton kernels of `paged_attention`: many programs share a row's tokens, a second kernel merges their results.

A decode step reads every key and value once and computes little, so all that counts is how much memory is read at a
time. A program serves all query heads of one key/value head, for a share of one row's tokens (a split). There are so
many splits that the programs fill the multiprocessors; a short row leaves most of its splits empty: they end at once.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tinsmith.kernels.dispatch import overlapping

TILES: dict[int, tuple[int, int, int]] = {
    16: (128, 4, 3),
    32: (128, 4, 3),
    64: (128, 4, 4),
    128: (64, 4, 4),
    256: (64, 8, 3),
}
"""Tokens that a program loads at a time, its warps and loads under way, by head_dim rounded up to a power of two."""
PROGRAMS = 4
"""Programs for each multiprocessor, if the rows have tokens for as many."""
MOST_SPLITS = 64
"""Splits of a row at most: the merging kernel holds what all of them found."""
FEW_SPLITS = 8
"""Up to so many are merged by a kernel that holds fewer."""
LOG2_E = tl.constexpr(math.log2(math.e))
GROUP_ROWS = 16
"""The least rows of a tensor core's product: the query heads of a key/value head are padded to it."""


def paged_kernel(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    most_splits: int = MOST_SPLITS,
    newest: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Compute `paged_attention` for head_dim up to 256 and blocks whose size divides the tile.

    Reads nothing on the host. `newest` are key and value [rows, kv_heads, head_dim] of each row's last token, which are
    not stored yet: then they are stored here. With one split at most, a row's result depends on nothing but the row.
    """
    rows, heads, head_dim = query.shape
    block, kv_heads = keys.shape[1:3]
    padded = max(16, triton.next_power_of_2(head_dim))
    tile, warps, stages = TILES[padded]
    splits = min(most_splits, _splits(rows * kv_heads, -(-table.shape[1] * block // tile), query.device))
    query = query if query.stride()[1:] == (head_dim, 1) else query.contiguous()
    key, value = (new if new.stride()[1:] == (head_dim, 1) else new.contiguous() for new in newest or (query, query))
    out = torch.empty(rows, heads, head_dim, dtype=query.dtype, device=query.device)
    merged = splits > 1
    parts = torch.empty(rows, heads, splits, head_dim, dtype=torch.float32, device=query.device) if merged else out
    weights = torch.empty(rows, heads, splits, dtype=torch.float32, device=query.device) if merged else out
    shape = {"HEAD_DIM": head_dim, "HEAD_PADDED": padded, "BLOCK": block, "TILE": tile, "WINDOW": window or 0}
    shape |= {"SINKS": sinks is not None, **overlapping(query.device, rows)}
    of_heads = lengths if sinks is None else sinks.contiguous()
    attend: Any = _attend
    attend[(kv_heads, rows, splits)](
        *(query, key, value, keys, values, table, lengths, of_heads, out, parts, weights, scale * LOG2_E.value),
        *(query.stride(0), key.stride(0), value.stride(0), table.stride(0), splits),
        **shape,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PADDED=max(GROUP_ROWS, triton.next_power_of_2(heads // kv_heads)),
        STORES=newest is not None,
        num_warps=warps,
        num_stages=stages,
    )
    if merged:
        merge: Any = _merge
        padded_splits = FEW_SPLITS if splits <= FEW_SPLITS else MOST_SPLITS
        merge[(heads, rows)](
            lengths,
            of_heads,
            out,
            parts,
            weights,
            splits,
            HEADS=heads,
            SPLITS_PADDED=padded_splits,
            num_warps=4,
            **shape,
        )
    return out


def _splits(programs: int, tiles: int, device: torch.device) -> int:
    """Return how many splits fill the device, given the programs of one split and the tiles of the longest row."""
    return max(1, min(-(-PROGRAMS * _multiprocessors(device) // programs), tiles, MOST_SPLITS))


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; a few in Triton's interpreter, which computes on a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _shares(
    length: tl.tensor, splits: tl.tensor, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr
) -> tl.tuple:
    """Return the first tile of a row, the tokens of each of its splits, and the number of splits that have any."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // BLOCK * BLOCK
    tiles = tl.cdiv(length - begin, TILE)
    each = tl.maximum(tl.cdiv(tiles, splits), 1)
    return begin, each * TILE, tl.cdiv(tiles, each)


@triton.jit
def _newest(
    q: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    length: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """If the split ends with the row's newest token, store that.

    Returns what attention to it alone gives, or to nothing in other splits.

    That is the highest score [GROUP_PADDED], the sum of weights [GROUP_PADDED] and that of weighted values
    [GROUP_PADDED, HEAD_PADDED].
    """
    channel = tl.arange(0, HEAD_PADDED)
    inside = channel < HEAD_DIM
    k = tl.load(key + channel, mask=inside, other=0.0)
    v = tl.load(value + channel, mask=inside, other=0.0)
    block = tl.load(table + (length - 1) // BLOCK).to(tl.int64)
    place = (block * BLOCK + (length - 1) % BLOCK) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + channel
    tl.store(keys + place, k, mask=inside & (last == length))
    tl.store(values + place, v, mask=inside & (last == length))
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    highest = tl.where(last == length, score, float("-inf"))
    total = tl.zeros_like(score) + tl.where(last == length, 1.0, 0.0)
    return highest, total, tl.zeros_like(q).to(tl.float32) + tl.where(last == length, v.to(tl.float32), 0.0)[None, :]


@triton.jit(do_not_specialize=["splits"])
def _attend(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    splits: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    STORES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """One split of one row for one key/value head. `scale` is to the base 2, as are all exponentials here."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    kv_head = tl.program_id(0)  # neighbouring programs read neighbouring memory
    row = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths + row)
    begin, share, used = _shares(length, splits, BLOCK, TILE, WINDOW)
    group = tl.arange(0, GROUP_PADDED)
    channel = tl.arange(0, HEAD_PADDED)
    heads = kv_head * GROUP + group
    held = (group < GROUP)[:, None] & (channel < HEAD_DIM)[None, :]
    row_heads = row.to(tl.int64) * KV_HEADS * GROUP + heads  # [GROUP_PADDED]
    if split < used:
        first = begin + split * share
        last = tl.minimum(first + share, length)
        q = tl.load(
            query + row.to(tl.int64) * query_stride + heads[:, None] * HEAD_DIM + channel[None, :], mask=held, other=0.0
        )
        token = tl.arange(0, TILE)
        highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
        total = tl.zeros([GROUP_PADDED], tl.float32)
        sums = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
        own = table + row.to(tl.int64) * table_stride
        if STORES:
            own_key = key + row.to(tl.int64) * key_stride + kv_head * HEAD_DIM
            own_value = value + row.to(tl.int64) * value_stride + kv_head * HEAD_DIM
            highest, total, sums = _newest(
                q,
                own_key,
                own_value,
                keys,
                values,
                own,
                length,
                last,
                scale,
                kv_head,
                KV_HEADS,
                HEAD_DIM,
                HEAD_PADDED,
                BLOCK,
            )
            last = tl.minimum(last, length - 1)  # the others follow
        for start in range(first, last, TILE):
            place = start + token
            seen = place < last
            if WINDOW > 0:
                seen = seen & (place >= length - WINDOW)
            block = tl.load(own + place // BLOCK, mask=place < last, other=0).to(tl.int64)
            offset = (block * BLOCK + place % BLOCK) * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM  # [TILE]
            inside = seen[:, None] & (channel < HEAD_DIM)[None, :]
            k = tl.load(keys + offset[:, None] + channel[None, :], mask=inside, other=0.0)  # [TILE, HEAD_PADDED]
            v = tl.load(values + offset[:, None] + channel[None, :], mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k)) * scale  # [GROUP_PADDED, TILE]
            scores = tl.where(seen[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            p = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(highest - higher)
            total = total * shrink + tl.sum(p, 1)
            sums = tl.dot(p.to(v.dtype), v, acc=sums * shrink[:, None])
            highest = higher
        if used == 1:
            if SINKS:
                sink = tl.load(sinks + heads, mask=group < GROUP, other=float("-inf")).to(tl.float32) * LOG2_E
                total += tl.exp2(sink - highest)
            found = sums / total[:, None]
            tl.store(out + row_heads[:, None] * HEAD_DIM + channel[None, :], found.to(out.dtype.element_ty), mask=held)
        else:
            found = sums / total[:, None]
            place = row_heads * splits + split
            tl.store(parts + place[:, None] * HEAD_DIM + channel[None, :], found.to(parts.dtype.element_ty), mask=held)
            tl.store(weights + place, (highest + tl.log2(total)).to(weights.dtype.element_ty), mask=group < GROUP)
    elif split == 0:  # a row of length 0
        nothing = tl.zeros([GROUP_PADDED, HEAD_PADDED], out.dtype.element_ty)
        tl.store(out + row_heads[:, None] * HEAD_DIM + channel[None, :], nothing, mask=held)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    lengths: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    parts: tl.tensor,
    weights: tl.tensor,
    splits: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """The output of one head of a row, from what its splits found."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    row = tl.program_id(1)
    _, _, used = _shares(tl.load(lengths + row), splits, BLOCK, TILE, WINDOW)
    if used > 1:
        place = row.to(tl.int64) * HEADS + head
        split = tl.arange(0, SPLITS_PADDED)
        channel = tl.arange(0, HEAD_PADDED)
        weight = tl.load(weights + place * splits + split, mask=split < used, other=float("-inf"))
        highest = tl.max(weight, 0)
        weight = tl.exp2(weight - highest)
        total = tl.sum(weight, 0)
        if SINKS:
            total += tl.exp2(tl.load(sinks + head).to(tl.float32) * LOG2_E - highest)
        weight = weight / total
        inside = (split < used)[:, None] & (channel < HEAD_DIM)[None, :]
        found = tl.load(parts + (place * splits + split)[:, None] * HEAD_DIM + channel[None, :], mask=inside, other=0.0)
        merged = tl.sum(found * weight[:, None], 0)
        tl.store(out + place * HEAD_DIM + channel, merged.to(out.dtype.element_ty), mask=channel < HEAD_DIM)
