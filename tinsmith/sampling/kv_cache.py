"""A paged key/value cache, and the two attention plans that use it.

Keys and values lie in blocks of `BLOCK` tokens; a sequence owns a list of blocks. Blocks are counted, so the samples of one prompt share
its full blocks. `PrefillPlan` computes prompts and stores their keys and values; `DecodePlan` computes one new token of many sequences.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.models.attention import PackedPlan

BLOCK = 16
"""Tokens in a block."""

NARROW = 16
"""Blocks that a sequence may be filled up to in any case: fewer, larger attention calls are faster than no padding."""


def blocks_for(tokens: int) -> int:
    """How many blocks hold that many tokens."""
    return -(-tokens // BLOCK)


@dataclass(frozen=True)
class CacheShape:
    """What one token costs."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, text_config: Any, dtype: torch.dtype, device: torch.device) -> "CacheShape":
        """Read from a language model's transformers configuration."""
        heads = text_config.num_attention_heads
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
        return cls(text_config.num_hidden_layers, kv_heads, head_dim, dtype, device)

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return 2 * self.layers * BLOCK * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """The memory, and which blocks of it are free. One more block than asked for: block 0 is scratch and never given out."""

    def __init__(self, shape: CacheShape, blocks: int) -> None:
        size = (shape.layers, blocks + 1, BLOCK, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.values = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self.total = blocks
        self.free: list[int] = []
        self.users: list[int] = []
        self.clear()

    def clear(self) -> None:
        """All blocks are free."""
        self.free = list(range(self.total, 0, -1))
        self.users = [0] * (self.total + 1)

    def take(self, count: int) -> list[int]:
        """That many free blocks, cleared: attention multiplies what it masks by 0, and a NaN that another model left would come through.

        Raises IndexError when there are too few: callers look at `free` first.
        """
        blocks = [self.free.pop() for _ in range(count)]
        for block in blocks:
            self.users[block] = 1
        self.keys[:, blocks] = 0
        self.values[:, blocks] = 0
        return blocks

    def share(self, block: int) -> int:
        """The same block for one more sequence."""
        self.users[block] += 1
        return block

    def give_back(self, blocks: list[int]) -> None:
        """A sequence no longer needs these; a block without users is free again."""
        for block in blocks:
            self.users[block] -= 1
            if self.users[block] == 0:
                self.free.append(block)

    def copy(self, block: int) -> int:
        """A new block with the same content."""
        (target,) = self.take(1)
        self.keys[:, target] = self.keys[:, block]
        self.values[:, target] = self.values[:, block]
        return target

    def store(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [kv_heads, tokens, head_dim] of `tokens` new tokens at `slots` (block · BLOCK + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key.transpose(0, 1))
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value.transpose(0, 1))


class PrefillPlan:
    """Whole prompts in one packed row; their keys and values are stored on the way."""

    def __init__(self, cache: KVCache, packed: PackedPlan, slots: Tensor) -> None:
        self.cache = cache
        self.packed = packed
        self.slots = slots

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """See `AttentionPlan.attend`."""
        self.cache.store(layer, self.slots, key, value)
        return self.packed.attend(layer, query, key, value, scale, window)


class DecodePlan:
    """One new token for each of many sequences, attending to its own cached tokens and itself.

    Sequences of similar length are attended to together: one long sequence does not make the short ones as wide as itself.
    """

    def __init__(self, cache: KVCache, block_lists: list[list[int]], lengths: list[int]) -> None:
        device = cache.keys.device
        last = [blocks[(length - 1) // BLOCK] * BLOCK + (length - 1) % BLOCK for blocks, length in zip(block_lists, lengths, strict=True)]
        self.cache = cache
        self.slots = torch.tensor(last, device=device)
        self.groups = [DecodeGroup(rows, block_lists, lengths, device) for rows in similar_widths([len(b) for b in block_lists])]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """See `AttentionPlan.attend`; `tokens` is the number of sequences."""
        self.cache.store(layer, self.slots, key, value)
        # Heads that share a key/value head become the query rows of one call: [sequences, kv_heads, group, head_dim].
        grouped = query.transpose(0, 1).reshape(len(self.slots), key.shape[0], -1, key.shape[2])
        out = torch.empty_like(grouped)
        for group in self.groups:
            out[group.rows] = group.attend(grouped[group.rows], self.cache.keys[layer], self.cache.values[layer], scale, window)
        return out.flatten(1, 2)


class DecodeGroup:
    """Sequences of a `DecodePlan` whose block lists are filled up to one width."""

    def __init__(self, rows: list[int], block_lists: list[list[int]], lengths: list[int], device: torch.device) -> None:
        widest = max(len(block_lists[row]) for row in rows)
        table = [block_lists[row] + [0] * (widest - len(block_lists[row])) for row in rows]
        self.rows = torch.tensor(rows, device=device)
        self.table = torch.tensor(table, device=device).flatten()
        self.lengths = torch.tensor([lengths[row] for row in rows], device=device).unsqueeze(1)
        self.columns = torch.arange(widest * BLOCK, device=device).unsqueeze(0)
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of query [sequences, kv_heads, group, head_dim] to keys and values [blocks, BLOCK, kv_heads, head_dim] of one layer."""
        count, kv_heads, _, head_dim = query.shape

        def cached(memory: Tensor) -> Tensor:  # [sequences, kv_heads, cached tokens, head_dim]
            return memory.index_select(0, self.table).view(count, -1, kv_heads, head_dim).transpose(1, 2)

        return scaled_dot_product_attention(query, cached(keys), cached(values), attn_mask=self._mask(window), scale=scale)

    def _mask(self, window: int | None) -> Tensor:
        """[sequences, 1, 1, cached tokens] True where a sequence may look; the same for every layer of one window."""
        if window not in self.masks:
            seen = self.columns < self.lengths
            if window is not None:
                seen &= self.columns >= self.lengths - window
            self.masks[window] = seen[:, None, None, :]
        return self.masks[window]


def similar_widths(widths: list[int]) -> list[list[int]]:
    """Indices of `widths` in groups whose members differ by a factor of two at most; up to `NARROW` blocks make one group."""
    groups: dict[int, list[int]] = {}
    for index, width in enumerate(widths):
        groups.setdefault((max(width, NARROW) - 1).bit_length(), []).append(index)
    return list(groups.values())
