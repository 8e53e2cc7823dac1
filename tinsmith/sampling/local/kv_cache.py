"""The memory of sampling: blocks of keys and values that sequences own, share, and leave for others that begin alike.

A block of `BLOCK` tokens is in use (by one or more sequences), idle (by none, but it holds tokens under a known key,
`sampling/prefix.py`) or free. Idle blocks are found again by their key, until their memory is needed: then the least
recently used goes first. Gated delta nets keep a state of fixed size for each sequence instead, in slots (`states.py`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from tinsmith.kernels.device import Fetched, reserve_zeros, upload
from tinsmith.memory.budget import BLOCK, CacheShape
from tinsmith.sampling.local.sequence import SequenceState
from tinsmith.sampling.local.states import StateSlots


class KVCache:
    """The cache and the use of its blocks.

    Block 0 is scratch: what is computed for nobody is written there, and nothing reads it.
    """

    def __init__(self, shape: CacheShape, blocks: int) -> None:
        kind = shape.attention
        self.index = {number: index for index, number in enumerate(shape.attention_layers)}
        """Index of a layer's keys and values by its number."""
        size = (len(self.index), blocks + 1, BLOCK, kind.kv_heads, kind.head_dim)
        self.keys = reserve_zeros(size, shape.dtype, shape.device)
        self.values = reserve_zeros(size, shape.dtype, shape.device)
        mixtures, per_token, number = shape.routes
        self.routes = reserve_zeros((mixtures, blocks + 1, BLOCK, per_token), number, shape.device)
        """The experts that computed each token."""
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
        """Take that many blocks; call `clean` before they are read.

        Raises KeyError when there are fewer than that `available`.
        """
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
        """Take a block that holds what this one does."""
        (target,) = self.take(1)
        self.unclean.discard(target)
        self.keys[:, target] = self.keys[:, block]
        self.values[:, target] = self.values[:, block]
        self.routes[:, target] = self.routes[:, block]
        return target

    def note_experts(self, places: Tensor, chosen: Tensor, first: int = 0) -> None:
        """Write the experts of tokens, `chosen` [mixtures, tokens, per_token] from the `first` one, at `places`."""
        own = self.routes[first : first + len(chosen)]
        own.flatten(1, 2).index_copy_(1, places, chosen.to(self.routes.dtype))

    def fetch_routes(self, sequence: SequenceState, end: int, blocks: Sequence[int]) -> None:
        """Fetch the experts of the first tokens of a sequence that has `blocks`, as far as it has not got them."""
        if end > sequence.routed:
            own = self.routes.index_select(1, upload(np.array(blocks, dtype=np.int64), self.routes.device))
            sequence.routes.append(Fetched([own.flatten(1, 2)[:, sequence.routed : end]]))
            sequence.routed = end

    def store(self, layer: int, places: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [tokens, kv_heads, head_dim] of a layer at `places` [tokens] (block · BLOCK + offset)."""
        index = self.index[layer]
        self.keys[index].flatten(0, 1).index_copy_(0, places, key)
        self.values[index].flatten(0, 1).index_copy_(0, places, value)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, [blocks, BLOCK, kv_heads, head_dim] each."""
        return self.keys[self.index[layer]], self.values[self.index[layer]]


# Decides what a sequence need not compute, because another with the same beginning has computed it or is about to.
#
# Keys and values can be shared up to any full block. A state of gated delta nets cannot be cut, so a sequence can only
# go on behind a block at whose end one was saved:
#
# - at the last full block of a prompt, for other requests with this prompt;
# - where two prompts that begin alike part, for all that follow with the same beginning, such as a system prompt;
# - at the last full block of a sequence that grows, for a conversation's next turn, and for itself if preempted.
#
# The first two cut a prompt once more, so they must spare others at least `WORTH_SAVING` blocks.

WORTH_SAVING = 64 // BLOCK


class PrefixCache:
    """Known beginnings of sequences, and states that are to be saved of them."""

    def __init__(self, cache: KVCache, states: StateSlots | None) -> None:
        self.cache = cache
        self.states = states

    def coming(self, filling: Iterable[SequenceState]) -> dict[bytes, SequenceState]:
        """Return the prompts that are being computed, by the keys of their blocks."""
        return {key: sequence for sequence in filling for key in sequence.keys_of(sequence.length // BLOCK)}

    def known(self, sequence: SequenceState) -> list[int]:
        """Return the blocks of its beginning that it need not compute."""
        keys = sequence.keys_of(sequence.needed_from // BLOCK)
        found = self.cache.find(keys)
        return found[: self.states.longest(keys[: len(found)])] if self.states else found

    def found(self, sequence: SequenceState, coming: dict[bytes, SequenceState]) -> list[int] | None:
        """Find a known beginning; None if a prompt in `coming` will provide a longer one, so that this one should wait.

        With states that prompt is told to save the state where the two part, if it has not got past there.
        """
        keys = sequence.keys_of(sequence.needed_from // BLOCK)
        known = self.known(sequence)
        if self.states is None:
            return None if len(known) < len(keys) and keys[len(known)] in coming else known
        alike = len(known)
        while alike < len(keys) and keys[alike] in coming:
            alike += 1
        if alike - len(known) >= WORTH_SAVING:
            ahead = coming[keys[alike - 1]]
            if ahead.stored < alike * BLOCK:
                ahead.saves.add(alike)
                return None
        return known

    def worth_saving(self, sequence: SequenceState, found: int) -> set[int]:
        """Return block counts after which to save the state of a sequence that is computed from block `found` on.

        If more than `found` are known, an earlier prompt began with them and went on otherwise, or its state is lost.
        """
        saves: set[int] = set()
        if self.states:
            known = len(self.cache.find(sequence.keys_of(sequence.needed_from // BLOCK)))
            for blocks in (known, (sequence.length - 1) // BLOCK):
                if blocks - max(found, *saves, 0) >= WORTH_SAVING:
                    saves.add(blocks)
        return saves

    def end_of_piece(self, sequence: SequenceState, most: int) -> int:
        """Return the end of a chunk of at most `most` prompt tokens: a state to save, else a full block if possible."""
        end = min(sequence.length, sequence.stored + most)
        if self.states:
            saved = [blocks * BLOCK for blocks in sequence.saves if sequence.stored < blocks * BLOCK <= end]
            if saved:
                return min(saved)
            if end < sequence.length and end // BLOCK * BLOCK > sequence.stored:
                return end // BLOCK * BLOCK
        return end

    def save_state(self, sequence: SequenceState, may_evict: bool) -> None:
        """Save the state of a sequence that a pass has computed to the end of a block.

        What `SequenceState.saves` does not name replaces what the sequence saved so before; if there is none, a saved
        state gives up its slot only if it `may_evict` one.
        """
        if self.states is None or sequence.stored % BLOCK:
            return
        full = sequence.stored // BLOCK
        named = full in sequence.saves
        if not (named or may_evict or self.states.free or sequence.newest_save in self.states.saved):
            return
        if sequence.newest_save:
            self.states.forget(sequence.newest_save)
            sequence.newest_save = None
        key = sequence.keys_of(full)[-1]
        if self.states.save(key, sequence.slot) and not named:
            sequence.newest_save = key
