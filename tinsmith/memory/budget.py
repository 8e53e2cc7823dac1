"""Divides a device's memory between the local sampler's cache and training, for `tinsmith plan` and for a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from tinsmith.config import Config, TrainingConfig
from tinsmith.errors import ConfigError
from tinsmith.memory.pass_memory import KEEP_ALL, PassMemory
from tinsmith.models.full import FullState
from tinsmith.models.layers import Attention, DeltaNet, Experts, LayerKind
from tinsmith.models.layout import Layout
from tinsmith.protocol.shapes import LoraShape

GIB = 2**30
CPU_CACHE = 2 * GIB
"""Cache of each base model on a CPU, unless a size is set: programs share memory, so what is free is not ours."""
SMALLEST_CACHE = GIB // 4
"""The cache of a GPU on which training leaves nothing, unless a size is set."""
PLANNED_ADAPTERS = 4
"""LoRA models for which an automatic cache leaves room unless it is set; of models with all parameters it is one."""
FREE_SHARE = 0.95
"""Share of the free memory that passes are planned into; the rest is lost between tensors."""

MOMENT_BLOCK = 256
"""Moments that share a scale in a compact state."""


@dataclass(frozen=True)
class FullBytes:
    """Bytes that full-parameter training takes, without the activations of a pass."""

    weights: int
    """The weights that passes read."""
    masters: int
    """The part of the float32 masters that the weights do not hold."""
    moments: int
    """Moments of AdamW."""
    gradients: int
    """Those that are accumulated."""
    pass_gradients: int
    """Those of one pass, while they are added. The first pass after a step needs none with a compact state."""
    host: int
    """Bytes in host memory."""

    @property
    def device(self) -> int:
        """All of it that lies on the device."""
        return self.weights + self.masters + self.moments + self.gradients + self.pass_gradients


def full_bytes(parameters: int, dtype: torch.dtype, state: FullState) -> FullBytes:
    """Return the bytes that training so many parameters on a base in `dtype` takes at most."""
    size = dtype.itemsize
    if state == "float32":
        return FullBytes(
            parameters * size, 0 if size == 4 else parameters * 4, parameters * 8, parameters * 4, parameters * size, 0
        )
    masters, moments = (0 if size == 4 else parameters * 2), 2 * parameters + 2 * 4 * parameters // MOMENT_BLOCK
    if state == "compact":
        return FullBytes(parameters * size, masters, moments, parameters * size, parameters * size, 0)
    return FullBytes(parameters * size, 0, 0, parameters * size, parameters * size, masters + moments)


def sharded_full_bytes(layers: Sequence[int], around: int, dtype: torch.dtype, workers: int) -> FullBytes:
    """Return the bytes of each worker for sharded parameters: of each layer, and `around` the layers.

    The latter, and their gradients of a pass, are whole on each worker, as are those of the layer whose backward is
    computed.
    """
    size = dtype.itemsize
    part = -(-(sum(layers) + around) // workers)
    masters = 0 if size == 4 else part * 4
    pass_gradients = part * 4 + around * size + max(layers) * (size + 4)
    return FullBytes((part + around) * size, masters, part * 8, part * 4, pass_gradients, 0)


def snapshot_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Memory of a frozen copy of that many parameters."""
    return parameters * dtype.itemsize


@dataclass(frozen=True)
class ModelBytes:
    """One trained model of the planned rank."""

    training: int
    """Bytes with accumulated gradients and AdamW's moments."""
    snapshot: int
    """Bytes of a frozen copy that is sampled."""
    host: int = 0
    """Bytes of it that wait in host memory (compact-host)."""


def lora_bytes(layout: Layout, shape: LoraShape, dtype: torch.dtype) -> ModelBytes:
    """Return the bytes of a LoRA model of this shape on a base in `dtype`."""
    numbers = layout.lora_parameters(shape)
    # float32 masters, and copies that passes read
    frozen = numbers * (4 if dtype == torch.float32 else 4 + dtype.itemsize)
    # Gradients of a pass, until they are added: of most adapters they are nothing beside the pass.
    of_experts = shape.rank * sum(target.width for target in layout.covered(shape).values() if target.experts)
    return ModelBytes(frozen + numbers * 3 * 4 + of_experts * dtype.itemsize, frozen)


def paged_out_at_most(sizes: Sequence[int], room: float) -> float:
    """Return the most bytes of models of these sizes that are ever paged out, of which a device has room for `room`.

    They leave it one by one until those fit that are needed, so what stays may be short of the room by the largest.
    """
    total = sum(sizes)
    return min(total - room + max(sizes), total - min(sizes)) if total > room else 0


def most_models(size: int, room: int, host: int) -> int:
    """Return how many models of that size a device with `room` bytes and its host train: see `paged_out_at_most`."""
    fit = room // size
    return max(fit, host // size + 1, (host + room) // size - 1) if fit else 0


@dataclass(frozen=True)
class Budget:
    """Memory that one base model may use beside its weights."""

    cache: int
    """Bytes of the local sampler's cache; 0 without that sampler."""
    passes: int
    """Bytes left to a pass beside one trained model: negative if that model does not fit, 0 if nothing is trained."""
    host: int = 0
    """Bytes of host memory that the model takes."""
    beside_caches: int = 0
    """Bytes left to models in training and their passes."""


def full_state(config: TrainingConfig) -> FullState:
    """State that full-parameter training keeps (--full-state)."""
    state: FullState = config.full_state  # type: ignore[assignment]  # one of its choices
    return state


def reserve_of(on_gpu: bool, total: int) -> int:
    """Bytes of a device that nothing is planned into: for libraries, captured graphs, images, steps of the sampler."""
    return GIB + total // 32 if on_gpu else 0


def divide_memory(free: int, bases: int, model: ModelBytes, passes: PassMemory, config: Config, on_gpu: bool) -> Budget:
    """Divide `free` bytes of a device that are left beside the weights of `bases` base models and the reserve.

    A cache of automatic size leaves room for `planned_models` models and for a pass of `tokens_per_pass` tokens. The
    pass gets what it takes without recomputation, but no more than half of what it shares with the cache, if it fits
    into that by recomputing.
    """
    sampling = config.sampling
    if config.only_compares:
        return Budget(0, 0)
    if not config.training.trains:
        left = _what_is_left_to_sampling(free, passes, config) // bases if on_gpu else CPU_CACHE
        return Budget(int(sampling.kv_cache_gib * GIB) or left, 0)
    cache = 0
    if sampling.sampler == "local":
        cache = int(sampling.kv_cache_gib * GIB) or (
            _what_is_left(free, model, passes, config) // bases if on_gpu else CPU_CACHE
        )
    beside = free - bases * cache
    return Budget(cache, int(FREE_SHARE * beside) - model.training, model.host, beside)


def _what_is_left(free: int, model: ModelBytes, passes: PassMemory, config: Config) -> int:
    """Bytes for all caches of a device."""
    training = config.training
    tokens, chunk = training.tokens_per_pass, training.logits_chunk
    count = training.planned_models or (PLANNED_ADAPTERS if training.planned_rank else 1)
    # One is sampled while the next is made
    snapshots = min(2 * count * model.snapshot, int(config.sampling.snapshot_gib * GIB))
    shared = free - count * model.training - snapshots
    whole, least = (passes.bytes(tokens, chunk, recomputation) for recomputation in (KEEP_ALL, passes.smallest))
    return max(int(shared - max(least, min(whole, shared // 2)) / FREE_SHARE), free // 16, SMALLEST_CACHE)


def _what_is_left_to_sampling(free: int, passes: PassMemory, config: Config) -> int:
    """Bytes for all caches of a device on which nothing is trained, beside sampled weights and chunks of prompts.

    A chunk takes less than a pass of as many tokens that keeps next to nothing for a backward pass.
    """
    sampling = config.sampling
    snapshots = min(int(sampling.snapshot_gib * GIB), free // 2)
    prompts = passes.bytes(sampling.prefill_tokens, config.training.logits_chunk, passes.smallest)
    return max(int(free - snapshots - prompts / FREE_SHARE), free // 16, SMALLEST_CACHE)


def computes_together(config: Config, workers: int) -> bool:
    """Whether so many workers compute a sequence together that is too long for one of them."""
    return workers > 1 and config.training.trains and not config.shards_weights and not config.models.deterministic


# Divides the memory of sampling between blocks of keys and values and slots of recurrent states.

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

        Some slots are left to saved states. Otherwise every prompt that begins like an earlier one would be computed
        whole while all places are taken, as they always are in reinforcement learning.
        """
        return self.slots - max(self.slots // SAVED, int(self.slots >= 4))


@dataclass(frozen=True)
class CacheShape:
    """Memory that the layers of a model take while they sample."""

    layers: tuple[LayerKind, ...]
    dtype: torch.dtype
    """Precision of keys, values and inputs of convolutions; recurrent states are float32."""
    device: torch.device
    experts: Mapping[int, Experts] = field(default_factory=dict)
    """The mixtures of experts, by layer."""

    @property
    def routes(self) -> tuple[int, int, torch.dtype]:
        """Mixtures, experts that compute a token in each, and what the number of one is kept in."""
        kind = next(iter(self.experts.values()), None)
        if kind is None:
            return 0, 0, torch.uint8
        return len(self.experts), kind.per_token, torch.uint8 if kind.count <= 256 else torch.int16

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
        mixtures, per_token, number = self.routes
        attention = len(self.attention_layers) * self.attention.bytes_per_token(self.dtype)
        return BLOCK * (attention + mixtures * per_token * number.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states; 0 if there are none."""
        kind = self.delta_net
        return len(self.delta_layers) * kind.state_bytes(self.dtype) if kind else 0

    def divide(self, budget: int, max_running: int) -> CacheSizes:
        """Compute the blocks and slots that `budget` bytes hold, for at most `max_running` sequences at once.

        Slots get up to half of the budget: a state of Qwen3.5 takes as much as keys and values of about 1,600 tokens,
        the length of a prompt with its answer. Raises ConfigError if the budget does not hold one sequence.
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
                f"sampling.kv_cache_gib={budget / 2**30:.3g} does not hold one sequence, whose state takes "
                f"{state:.3g} GiB beside keys and values; start with --kv-cache-gib {8 * state:.3g}, "
                "which holds four states, or more"
            )
        return CacheSizes(max(1, blocks), slots)

    def _only(self, wanted: type[Kind]) -> Kind | None:
        kinds = {kind for kind in self.layers if isinstance(kind, wanted)}
        if len(kinds) > 1:
            raise ConfigError(
                f"the local sampler needs layers of equal sizes, and these differ: {', '.join(sorted(map(str, kinds)))}"
            )
        return kinds.pop() if kinds else None


def blocks_for(tokens: int) -> int:
    """Return the number of blocks for so many tokens."""
    return -(-tokens // BLOCK)
