"""The memory of sampling: blocks of keys and values that sequences own, share, and leave for others that begin alike.

A block of `BLOCK` tokens is in use (by one or more sequences), idle (by none, but it holds tokens under a known key, `sampling/prefix.py`)
or free. Idle blocks are found again by their key, until their memory is needed: then the least recently used goes first. Gated delta nets
keep a state of fixed size for each sequence instead, in slots (`states.py`).
"""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from tinsmith.kernels.device import reserve_zeros, upload
from tinsmith.memory.cache_sizes import BLOCK, CacheShape


class KVCache:
    """The cache and the use of its blocks. Block 0 is scratch: what is computed for nobody is written there, and nothing reads it."""

    def __init__(self, shape: CacheShape, blocks: int) -> None:
        kind = shape.attention
        self.index = {number: index for index, number in enumerate(shape.attention_layers)}
        """Index of a layer's keys and values by its number."""
        size = (len(self.index), blocks + 1, BLOCK, kind.kv_heads, kind.head_dim)
        self.keys = reserve_zeros(size, shape.dtype, shape.device)
        self.values = reserve_zeros(size, shape.dtype, shape.device)
        self.total = blocks
        self.free: list[int] = []
        self.unclean: set[int] = set()
        """Blocks that were taken and not cleaned yet."""
        self.users: list[int] = []
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.block_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.clear()

    @property
    def available(self) -> int:
        return len(self.free) + len(self.idle)

    def clear(self) -> None:
        """Free all blocks, and forget all keys."""
        self.free = list(range(self.total, 0, -1))
        self.unclean.clear()
        self.users = [0] * (self.total + 1)
        self.idle.clear()
        self.block_of.clear()
        self.key_of.clear()

    def take(self, count: int) -> list[int]:
        """Take that many blocks; call `clean` before they are read. Raises KeyError when there are fewer than that `available`."""
        while len(self.free) < count:
            block, _ = self.idle.popitem(last=False)
            del self.block_of[self.key_of.pop(block)]
            self.free.append(block)
        blocks = self.free[len(self.free) - count :][::-1]
        del self.free[len(self.free) - count :]
        self.unclean.update(blocks)
        for block in blocks:
            self.users[block] = 1
        return blocks

    def clean(self) -> None:
        """Clear the blocks that were taken: attention multiplies what it masks by 0, which keeps a NaN."""
        if self.unclean:
            blocks = upload(np.fromiter(self.unclean, np.int64), self.keys.device)
            self.keys.index_fill_(1, blocks, 0)
            self.values.index_fill_(1, blocks, 0)
            self.unclean.clear()

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning of `keys`."""
        found: list[int] = []
        for key in keys:
            if key not in self.block_of:
                break
            found.append(self.block_of[key])
        return found

    def share(self, block: int) -> int:
        """Count one more sequence that uses the block, which is returned."""
        self.users[block] += 1
        self.idle.pop(block, None)
        return block

    def remember(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Note the keys of full blocks, which will not change any more. A known key stays with its block."""
        for key, block in zip(keys, blocks, strict=True):
            if key not in self.block_of and block not in self.key_of:
                self.block_of[key] = block
                self.key_of[block] = key

    def give_back(self, blocks: Sequence[int]) -> None:
        """Give back the blocks of a sequence, in its order: the last is evicted first."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0:
                if block in self.key_of:
                    self.idle[block] = None
                else:
                    self.free.append(block)

    def copy(self, block: int) -> int:
        (target,) = self.take(1)
        self.unclean.discard(target)
        self.keys[:, target] = self.keys[:, block]
        self.values[:, target] = self.values[:, block]
        return target

    def store(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [tokens, kv_heads, head_dim] of a layer at `places` [tokens] (block · BLOCK + offset)."""
        index = self.index[layer]
        self.keys[index].flatten(0, 1).index_copy_(0, places, key)
        self.values[index].flatten(0, 1).index_copy_(0, places, value)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, [blocks, BLOCK, kv_heads, head_dim] each."""
        return self.keys[self.index[layer]], self.values[self.index[layer]]
