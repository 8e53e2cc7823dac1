"""Attention whose result for a token depends on the tokens that it sees and on nothing else: not on how many others are computed with it.

Every token is a row of its own and reads keys and values from blocks, in chunks of one size that begin with its sequence. That takes more
time than attention that shares what it reads between tokens.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import on_paged_kernel

BLOCK = 16
"""Tokens of a block of a packed row."""

ROWS = 16
"""Rows that PyTorch computes at a time; fewer are filled up."""
CHUNK = 64
"""Tokens of a chunk, in PyTorch; a multiple of the size of a block."""


def stable_attention(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, scale: float, window: int | None
) -> Tensor:
    """Attention output [rows, heads, head_dim] of query [rows, heads, head_dim] to what each row sees.

    keys and values [blocks, block size, kv_heads, head_dim]; `table` [rows, most blocks] names the blocks of each row, which sees `lengths`
    [rows] tokens, or the last `window` of them. Places behind them may hold anything.
    """
    if on_paged_kernel(query):
        from tinsmith.kernels.paged_attention import paged_kernel

        return paged_kernel(query, keys, values, table.int(), lengths.int(), scale, window, most_splits=1)
    return torch.cat([_tile(*tile, keys, values, scale, window) for tile in _tiles(query, table, lengths, keys.shape[1])])[: len(query)]


class PackedBlocks:
    """The sequences of a packed row as `stable_attention` takes them: each begins with a block of its own."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        counts = np.array(lengths)
        blocks = -(-counts // BLOCK)
        firsts = np.cumsum(blocks) - blocks  # the first block of each sequence
        within = np.concatenate([np.arange(length) for length in lengths])
        owner = np.repeat(np.arange(len(counts)), counts)
        table = firsts[:, np.newaxis] + np.minimum(np.arange(blocks.max()), blocks[:, np.newaxis] - 1)  # [sequences, most blocks]
        self.blocks = int(blocks.sum())
        self.places = upload(firsts[owner] * BLOCK + within, device)
        """[tokens]: where each lies, as block · BLOCK + offset."""
        table_on_device = upload(table.astype(np.int32), device)
        # [tokens, most blocks]. For one long sequence this is a view: written out, it would grow with the square of the length.
        whole = len(counts) == 1
        self.table = table_on_device.expand(len(owner), -1) if whole else table_on_device.index_select(0, upload(owner, device))
        self.lengths = upload(within + 1, device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention; shapes as in `PassPlan.attend`."""
        keys, values = (
            x.new_zeros(self.blocks * BLOCK, *x.shape[1:]).index_copy_(0, self.places, x).unflatten(0, (self.blocks, BLOCK))
            for x in (key, value)
        )
        return stable_attention(query, keys, values, self.table, self.lengths, scale, window)


def _tiles(query: Tensor, table: Tensor, lengths: Tensor, block: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, tables and lengths of `ROWS` rows each; the last ones filled up with rows that see nothing."""
    missing_blocks = -table.shape[1] % (CHUNK // block)
    tiles = []
    for q, blocks, ends in zip(query.split(ROWS), table.split(ROWS), lengths.split(ROWS), strict=True):
        missing_rows = ROWS - len(q)
        q = torch.cat([q, q.new_zeros(missing_rows, *q.shape[1:])])
        tiles.append((q, pad(blocks.long(), (0, missing_blocks, 0, missing_rows)), pad(ends.long(), (0, missing_rows))))
    return tiles


def _tile(query: Tensor, table: Tensor, lengths: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """One tile, chunk by chunk. Chunks that a row does not see change nothing of it, to the last bit."""
    rows, heads, head_dim = query.shape
    block, kv_heads = keys.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    q = query.to(exact).view(rows * kv_heads, heads // kv_heads, head_dim) * scale
    highest = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, sums = torch.zeros_like(highest), torch.zeros_like(q)
    ends = lengths[:, None, None]
    for start in range(0, max(1, int(lengths.max())), CHUNK):
        place = start + torch.arange(CHUNK, device=query.device)
        seen = place < ends if window is None else (place < ends) & (place >= ends - window)  # [rows, 1, CHUNK]
        seen = seen.expand(-1, kv_heads, -1).reshape(rows * kv_heads, 1, CHUNK)
        index = table[:, start // block : (start + CHUNK) // block].flatten()
        k, v = (
            memory.index_select(0, index).view(rows, CHUNK, kv_heads, head_dim).transpose(1, 2).reshape(-1, CHUNK, head_dim).to(exact)
            for memory in (keys, values)
        )  # [rows · kv_heads, CHUNK, head_dim]
        scores = torch.where(seen, torch.bmm(q, k.mT), -torch.inf)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        level = torch.where(higher == -torch.inf, 0.0, higher)
        p, shrink = (scores - level).exp(), (highest - level).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        sums = sums * shrink + torch.bmm(p, torch.where(seen.mT, v, 0.0))
        highest = higher
    return torch.where(total > 0, sums / total, 0.0).to(query.dtype).view(rows, heads, head_dim)
