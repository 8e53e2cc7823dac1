"""Computes what sampling keeps of a sequence from the kinds of a model's layers, and divides the cache's memory.

Layers that attend keep keys and values of every token, in blocks of `BLOCK` tokens (`kv_cache.py`). Gated delta nets keep a state of fixed
size for each sequence, in slots (`states.py`). Models without gated delta nets have no slots.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from tinsmith.errors import ConfigError
from tinsmith.models.layers import Attention, DeltaNet, LayerKind
from tinsmith.sampling.prefix import BLOCK

SAVED = 8
"""One of so many slots is for saved states."""
FREE_BLOCKS = 2**16
"""Blocks of a model in which no layer attends: they only count its tokens, and take no memory."""


@dataclass(frozen=True)
class CacheSizes:
    """Numbers of blocks and slots."""

    blocks: int
    slots: int

    @property
    def places(self) -> int:
        """Return how many sequences of a model with gated delta nets can run at once.

        An eighth of the slots is left to saved states, and one of four already. Without them every prompt that begins like an earlier one
        would be computed whole while all places are taken, which is always the case in reinforcement learning.
        """
        return self.slots - max(self.slots // SAVED, int(self.slots >= 4))


@dataclass(frozen=True)
class CacheShape:
    """Memory that the layers of one model keep for sampling."""

    layers: tuple[LayerKind, ...]
    """The kind of each layer."""
    dtype: torch.dtype
    """Precision of keys, values and the inputs of convolutions; recurrent states are float32."""
    device: torch.device

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep keys and values."""
        return tuple(number for number, kind in enumerate(self.layers) if isinstance(kind, Attention))

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep a state."""
        return tuple(number for number, kind in enumerate(self.layers) if isinstance(kind, DeltaNet))

    @property
    def attention(self) -> Attention:
        """The one kind of all layers that attend; one without heads if there is none. Raises ConfigError if they differ."""
        kinds = {kind for kind in self.layers if isinstance(kind, Attention)}
        self._require_one(kinds)
        return kinds.pop() if kinds else Attention(0, 0)

    @property
    def delta_net(self) -> DeltaNet | None:
        """The one kind of all gated delta nets; None if there is none. Raises ConfigError if they differ."""
        kinds = {kind for kind in self.layers if isinstance(kind, DeltaNet)}
        self._require_one(kinds)
        return kinds.pop() if kinds else None

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block in all layers."""
        return BLOCK * len(self.attention_layers) * self.attention.bytes_per_token(self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes that one sequence keeps in all gated delta nets; 0 if there is none."""
        kind = self.delta_net
        return len(self.delta_layers) * kind.state_bytes(self.dtype) if kind else 0

    def divide(self, budget: int, max_running: int) -> CacheSizes:
        """The blocks and slots that `budget` bytes hold, for at most `max_running` sequences at once.

        Slots get up to half of the budget: a state of Qwen3.5 takes as much as keys and values of about 1,600 tokens, so that prompts with
        answers of about this length fill both halves. There are never more slots than places for `max_running` sequences need; blocks get
        what is left. Raises ConfigError if the budget does not hold one sequence.
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

    def _require_one(self, kinds: Collection[LayerKind]) -> None:
        if len(kinds) > 1:
            raise ConfigError(f"the local sampler needs layers of equal sizes, and these differ: {', '.join(sorted(map(str, kinds)))}")
