"""Divides the memory of sampling between blocks of keys and values and slots of recurrent states."""

from dataclasses import dataclass
from typing import TypeVar

import torch

from tinsmith.errors import ConfigError
from tinsmith.models.layers import Attention, DeltaNet, LayerKind

BLOCK = 16
"""Tokens in a block."""
Kind = TypeVar("Kind", Attention, DeltaNet)

SAVED = 8
"""Share of the slots that is for saved states: one of so many."""
FREE_BLOCKS = 2**16
"""Blocks of a model in which no layer attends: they count its tokens, and take no memory."""


@dataclass(frozen=True)
class CacheSizes:
    """Numbers of blocks and slots."""

    blocks: int
    slots: int

    @property
    def places(self) -> int:
        """Number of sequences of a model with gated delta nets that run at once.

        Some slots are left to saved states. Otherwise every prompt that begins like an earlier one would be computed whole while all places
        are taken, as they always are in reinforcement learning.
        """
        return self.slots - max(self.slots // SAVED, int(self.slots >= 4))


@dataclass(frozen=True)
class CacheShape:
    """Memory that the layers of a model take while they sample."""

    layers: tuple[LayerKind, ...]
    dtype: torch.dtype
    """Precision of keys, values and inputs of convolutions; recurrent states are float32."""
    device: torch.device

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(number for number, kind in enumerate(self.layers) if isinstance(kind, Attention))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        return tuple(number for number, kind in enumerate(self.layers) if isinstance(kind, DeltaNet))

    @property
    def attention(self) -> Attention:
        """The kind of all layers that attend; without heads if there is none. Raises ConfigError if they differ."""
        return self._only(Attention) or Attention(0, 0)

    @property
    def delta_net(self) -> DeltaNet | None:
        """The kind of all gated delta nets; None if there is none. Raises ConfigError if they differ."""
        return self._only(DeltaNet)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return BLOCK * len(self.attention_layers) * self.attention.bytes_per_token(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states; 0 if there are none."""
        kind = self.delta_net
        return len(self.delta_layers) * kind.state_bytes(self.dtype) if kind else 0

    def divide(self, budget: int, max_running: int) -> CacheSizes:
        """Compute the blocks and slots that `budget` bytes hold, for at most `max_running` sequences at once.

        Slots get up to half of the budget: a state of Qwen3.5 takes as much as keys and values of about 1,600 tokens, the length of a
        prompt with its answer. Raises ConfigError if the budget does not hold one sequence.
        """
        slots = 0
        if self.state_bytes:
            useful = -(-SAVED * max_running // (SAVED - 1))
            slots = max(1, min(useful, budget // (2 * self.state_bytes)))
        left = budget - slots * self.state_bytes
        blocks = max(left, 0) // self.block_bytes if self.block_bytes else FREE_BLOCKS
        if slots and (left < 0 or blocks < 1):
            state = self.state_bytes / 2**30
            raise ConfigError(
                f"sampling.kv_cache_gib={budget / 2**30:.3g} does not hold one sequence, whose state takes {state:.3g} GiB beside keys and "
                f"values; start with --kv-cache-gib {8 * state:.3g}, which holds four states, or more"
            )
        return CacheSizes(max(1, blocks), slots)

    def _only(self, wanted: type[Kind]) -> Kind | None:
        kinds = {kind for kind in self.layers if isinstance(kind, wanted)}
        if len(kinds) > 1:
            raise ConfigError(f"the local sampler needs layers of equal sizes, and these differ: {', '.join(sorted(map(str, kinds)))}")
        return kinds.pop() if kinds else None


def blocks_for(tokens: int) -> int:
    """Return the number of blocks for so many tokens."""
    return -(-tokens // BLOCK)
