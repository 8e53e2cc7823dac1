"""Attention to cached keys and values, for windows of a packed row and for one new token of each batch row.

Keys and values are stored first. Windows that begin their sequence attend among themselves, as in training; the others
attend to their cached tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import half_on_gpu, on_paged_kernel
from tinsmith.memory.budget import BLOCK, blocks_for
from tinsmith.models.attention import (
    FlashAttention,
    PackedPlan,
    TiledAttention,
    attend_to_all,
    flash_attention,
    stable_attention,
    with_sinks,
)
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.states import StatefulPlan, StateSlots, StateSteps


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens [start, end) of a sequence that a pass computes.

    `blocks` hold the tokens before, and have room for these.
    """

    blocks: list[int]
    start: int
    end: int
    slot: int = -1
    """Slot of the state before them, in a model with gated delta nets."""

    def __len__(self) -> int:
        return self.end - self.start

    def places(self) -> list[int]:
        """Return the places of its tokens' keys and values: block · BLOCK + offset."""
        return [self.blocks[place // BLOCK] * BLOCK + place % BLOCK for place in range(self.start, self.end)]


class CachedPlan(StatefulPlan):
    """The `PassPlan` of a row of windows."""

    def __init__(
        self, cache: KVCache, windows: Sequence[Window], states: StateSlots | None = None, stable: bool = False
    ) -> None:
        """If `stable`, attention is computed as in `models/attention.py`."""
        device, dtype = cache.keys.device, cache.keys.dtype
        starts, total = [], 0
        for window in windows:
            starts.append(total)
            total += len(window)
        fresh = [i for i, window in enumerate(windows) if window.start == 0]
        rows = [row for i in fresh for row in range(starts[i], starts[i] + len(windows[i]))]
        steps = None
        if states:
            steps = StateSteps(states, upload(np.array([w.slot for w in windows]), device), [len(w) for w in windows])
        super().__init__(steps)
        self.cache = cache
        self.places = upload(np.array([place for window in windows for place in window.places()]), device)
        self.fresh = upload(np.array(rows, dtype=np.int64), device)
        self.packed = PackedPlan([len(windows[i]) for i in fresh], device, dtype) if fresh else None
        later = [i for i, window in enumerate(windows) if window.start > 0]
        self.continued = (
            ContinuedWindows([starts[i] for i in later], [windows[i] for i in later], device) if later else None
        )
        self.by_token = _by_token(windows, device) if stable else None

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        self.cache.store(layer, self.places, key, value)
        if self.by_token is not None:
            keys, values = self.cache.of_layer(layer)
            return stable_attention(query, keys, values, *self.by_token, scale, window, sinks)
        if self.packed and not self.continued:
            return self.packed.attend(layer, query, key, value, scale, window, sinks)
        out = torch.empty_like(query)
        if self.packed:
            q, k, v = (x[self.fresh] for x in (query, key, value))
            out[self.fresh] = self.packed.attend(layer, q, k, v, scale, window, sinks)
        if self.continued:
            out[self.continued.rows] = self.continued.attend(
                query[self.continued.rows], *self.cache.of_layer(layer), scale, window, sinks
            )
        return out

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        self.cache.note_experts(self.places, chosen.unsqueeze(0), mixture)
        return chosen


def _by_token(windows: Sequence[Window], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's visible blocks [tokens, most blocks] and how many tokens in them it sees [tokens]."""
    most = max(len(window.blocks) for window in windows)
    tables = np.array([window.blocks + window.blocks[:1] * (most - len(window.blocks)) for window in windows])
    owner = np.repeat(np.arange(len(windows)), [len(window) for window in windows])
    seen = np.concatenate([np.arange(window.start, window.end) + 1 for window in windows])
    return upload(tables, device).index_select(0, upload(owner, device)), upload(seen, device)


class ContinuedWindows:
    """Windows that continue their sequences. What they see is gathered into one row for each layer."""

    def __init__(self, starts: list[int], windows: list[Window], device: torch.device) -> None:
        """`starts` are the rows where the windows begin."""
        self.widths, self.lengths = [len(window) for window in windows], [window.end for window in windows]
        rows = [np.arange(start, start + width) for start, width in zip(starts, self.widths, strict=True)]
        within = np.arange(BLOCK)
        places = [(np.array(w.blocks)[:, np.newaxis] * BLOCK + within).ravel()[: w.end] for w in windows]
        self.rows, self.places = upload(np.concatenate(rows), device), upload(np.concatenate(places), device)
        """[tokens]: the rows of the windows; the places of what they see, block · BLOCK + offset."""
        self.cu_query, self.cu_key = (
            upload(np.cumsum([0, *counts], dtype=np.int32), device) for counts in (self.widths, self.lengths)
        )
        self.longest = max(self.widths), max(self.lengths)

    def gather(self, memory: Tensor) -> Tensor:
        """Gather one layer's visible keys or values as [tokens, kv_heads, head_dim].

        `memory` is [blocks, BLOCK, kv_heads, head_dim].
        """
        return memory.flatten(0, 1).index_select(0, self.places)

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend from `query` [tokens of the windows, heads, head_dim] to keys and values as `gather` takes them."""
        k, v = self.gather(keys), self.gather(values)
        if half_on_gpu(query.device, query.dtype):
            bounds = self.cu_query, self.cu_key, self.longest
            if sinks is None:
                return flash_attention(query, k, v, *bounds, scale, window)
            return with_sinks(FlashAttention(*bounds, scale, window), query, k, v, sinks)
        pieces = zip(query.split(self.widths), k.split(self.lengths), v.split(self.lengths), strict=True)
        if sinks is None:
            return torch.cat([_attend_last(*piece, scale, window) for piece in pieces])
        return torch.cat([with_sinks(TiledAttention(1, scale, window), *piece, sinks) for piece in pieces])


def _attend_last(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend from the last tokens of a sequence to all of it.

    `query` is [tokens, heads, head_dim]; `key` and `value` are [all, kv_heads, head_dim].
    """
    columns = torch.arange(len(key), device=key.device)
    places = columns[-len(query) :].unsqueeze(1)
    seen = columns <= places
    if window is not None:
        seen &= columns > places - window
    if len(query) == 1:  # heads that share a key/value head become the query rows of one call
        folded = query.view(1, key.shape[1], -1, query.shape[2])
        k, v = (x.transpose(0, 1).unsqueeze(0) for x in (key, value))
        return scaled_dot_product_attention(folded, k, v, attn_mask=seen, scale=scale).flatten(1, 2)
    # On CUDA only a kernel that keeps all scores takes groups of heads in float32.
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).squeeze(0).transpose(0, 1)


# One new token of each row


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute the attention [rows, heads, head_dim] of query [rows, heads, head_dim] to what each row has in the cache.

    keys and values [blocks, BLOCK, kv_heads, head_dim] are those of one layer. `table` [rows, most blocks] int32 names
    the blocks of each row, and `lengths` [rows] int32 says how many tokens lie in them, the new one included, which is
    stored already. `window` is the number of last tokens that a row sees; None means all. `sinks` [heads] are scores
    that take a share of the softmax. A row of length 0 gets zeros.
    Other blocks, and places behind its length, may hold anything, NaN included, if the table names blocks that exist.

    In half precision on CUDA a Triton kernel computes it, which reads lengths on the device, as CUDA graphs require.
    """
    if on_paged_kernel(query):
        from tinsmith.kernels.paged_attention import paged_kernel

        return paged_kernel(query, keys, values, table, lengths, scale, window, sinks)
    if table.device.type == "cpu":  # reading a length there waits for nothing
        table = table[:, : max(1, blocks_for(int(lengths.max())))]
    return paged_reference(query, keys, values, table, lengths, scale, window, sinks)


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `paged_attention` by the kernel, which also stores the key and value of each row's newest token.

    Both are [rows, kv_heads, head_dim]. `on_paged_kernel` must say that there is a kernel. No row may read where the
    newest token of another is stored.
    """
    from tinsmith.kernels.paged_attention import paged_kernel

    return paged_kernel(query, keys, values, table, lengths, scale, window, sinks, newest=(key, value))


def paged_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `paged_attention` in PyTorch, without reading anything on the host. It gathers the whole table."""
    rows, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    index = table.flatten().long()
    k, v = (
        # [rows, kv_heads, table · BLOCK, head_dim]
        memory.index_select(0, index).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
        for memory in (keys, values)
    )
    places = torch.arange(table.shape[1] * BLOCK, device=table.device)
    seen = places < lengths.unsqueeze(1)
    if window is not None:
        seen &= places >= lengths.unsqueeze(1) - window
    seen = seen[:, None, :]  # [rows, 1, table · BLOCK]
    # Attention multiplies what it masks by 0, and a NaN there would get through.
    k, v = (torch.where(seen.unsqueeze(-1), memory, 0) for memory in (k, v))
    if sinks is not None:
        out = attend_to_all(query, k, v, seen.squeeze(1), scale, sinks)
    else:
        # Heads that share a key/value head are the query rows of one call
        folded = query.view(rows, kv_heads, heads // kv_heads, head_dim)
        out = scaled_dot_product_attention(folded, k, v, attn_mask=seen.unsqueeze(2), scale=scale).flatten(1, 2)
    return torch.where((lengths > 0)[:, None, None], out, 0)


def gathered_bytes(keys: Tensor, rows: int, blocks: int) -> int:
    """Return the bytes of keys and values that a call copies for `rows` of `blocks` blocks; 0 with the kernel.

    `keys` [blocks, BLOCK, kv_heads, head_dim] are one layer's.
    """
    return 0 if on_paged_kernel(keys) else 2 * rows * blocks * keys[0].nbytes
