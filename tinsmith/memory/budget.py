"""Divides a device's memory between the local sampler's cache and training, for `tinsmith plan` and for a server."""

from dataclasses import dataclass

import torch

from tinsmith.config import Config, TrainingConfig
from tinsmith.memory.pass_memory import KEEP_ALL, PassMemory
from tinsmith.models.full import FullBytes, FullState, snapshot_bytes
from tinsmith.models.layout import Layout
from tinsmith.protocol.shapes import LoraShape

GIB = 2**30
CPU_CACHE = 2 * GIB
"""The cache of each base model on a CPU, unless a size is set: programs share that memory, so what is left is not ours."""
SMALLEST_CACHE = GIB // 4
"""The cache of a GPU on which training leaves nothing, unless a size is set."""
PLANNED_ADAPTERS = 4
"""LoRA models for which an automatic cache leaves room unless it is set; of models with all parameters it is one."""
FREE_SHARE = 0.95
"""Share of the free memory that passes are planned into; the rest is lost between tensors."""


@dataclass(frozen=True)
class ModelBytes:
    """One trained model of the planned rank."""

    training: int
    """Bytes with accumulated gradients and AdamW's moments."""
    snapshot: int
    """Bytes of a frozen copy that is sampled."""
    host: int = 0
    """Bytes of it that wait in host memory (compact-host)."""


def model_bytes(layout: Layout, dtype: torch.dtype, rank: int, full_parameters: int, full: FullBytes) -> ModelBytes:
    """Return the bytes of one trained model; for rank 0, of one with `full_parameters` parameters that takes `full`."""
    if rank == 0:
        return ModelBytes(full.device, snapshot_bytes(full_parameters, dtype), full.host)
    numbers = layout.lora_parameters(LoraShape(rank, seed=0))
    frozen = numbers * (4 if dtype == torch.float32 else 4 + dtype.itemsize)  # float32 masters, and copies of them that passes read
    return ModelBytes(frozen + numbers * 3 * 4, frozen)


@dataclass(frozen=True)
class Budget:
    """Memory that one base model may use beside its weights."""

    cache: int
    """Bytes of the local sampler's cache; 0 without that sampler."""
    passes: int
    """Bytes left to a pass while one model is trained; negative without room for that model, 0 if nothing is trained."""
    host: int = 0
    """Bytes of host memory that the model takes."""


def full_state(config: TrainingConfig) -> FullState:
    """State that full-parameter training keeps (--full-state)."""
    state: FullState = config.full_state  # type: ignore[assignment]  # one of its choices
    return state


def reserve_of(on_gpu: bool, total: int) -> int:
    """Bytes of a device that nothing is planned into: for libraries, captured graphs, images, steps of the sampler."""
    return GIB + total // 32 if on_gpu else 0


def divide_memory(free: int, bases: int, model: ModelBytes, passes: PassMemory, config: Config, on_gpu: bool) -> Budget:
    """Divide `free` bytes of a device that are left beside the weights of `bases` base models and the reserve.

    A cache of automatic size leaves room for `planned_models` models and for a pass of `tokens_per_pass` tokens. The pass gets what it
    takes without recomputation, but no more than half of what it shares with the cache, if it fits into that by recomputing.
    """
    sampling = config.sampling
    if config.only_compares:
        return Budget(0, 0)
    if not config.training.trains:
        left = _what_is_left_to_sampling(free, passes, config) // bases if on_gpu else CPU_CACHE
        return Budget(int(sampling.kv_cache_gib * GIB) or left, 0)
    cache = 0
    if sampling.sampler == "local":
        cache = int(sampling.kv_cache_gib * GIB) or (_what_is_left(free, model, passes, config) // bases if on_gpu else CPU_CACHE)
    return Budget(cache, int(FREE_SHARE * (free - bases * cache)) - model.training, model.host)


def _what_is_left(free: int, model: ModelBytes, passes: PassMemory, config: Config) -> int:
    """Bytes for all caches of a device."""
    training = config.training
    tokens, chunk = training.tokens_per_pass, training.logits_chunk
    count = training.planned_models or (PLANNED_ADAPTERS if training.planned_rank else 1)
    snapshots = min(2 * count * model.snapshot, int(config.sampling.snapshot_gib * GIB))  # one is sampled while the next is made
    shared = free - count * model.training - snapshots
    whole, least = (passes.bytes(tokens, chunk, recomputation) for recomputation in (KEEP_ALL, passes.smallest))
    return max(int(shared - max(least, min(whole, shared // 2)) / FREE_SHARE), free // 16, SMALLEST_CACHE)


def _what_is_left_to_sampling(free: int, passes: PassMemory, config: Config) -> int:
    """Bytes for all caches of a device on which nothing is trained: beside the weights that are sampled, and chunks of prompts.

    A chunk takes less than a pass of as many tokens that keeps next to nothing for a backward pass.
    """
    sampling = config.sampling
    snapshots = min(int(sampling.snapshot_gib * GIB), free // 2)
    prompts = passes.bytes(sampling.prefill_tokens, config.training.logits_chunk, passes.smallest)
    return max(int(free - snapshots - prompts / FREE_SHARE), free // 16, SMALLEST_CACHE)


def longest_trained(budget: Budget, passes: PassMemory, config: Config, max_context: int, host_free: int, on_gpu: bool) -> int:
    """The longest sequence, in tokens, that trains beside everything else, with half of the free host memory; 0 if none does."""
    waiting = max(0, host_free - budget.host) // 2 if on_gpu else 0
    return passes.longest(config.training.logits_chunk, budget.passes, waiting, max_context)


def computes_together(config: Config, workers: int) -> bool:
    """Whether so many workers compute a sequence together that is too long for one of them."""
    return workers > 1 and config.training.trains and not config.shards_weights and not config.models.deterministic


def longest_together(
    budget: Budget, slices: PassMemory, workers: int, config: Config, max_context: int, host_free: int, on_gpu: bool
) -> int:
    """The longest sequence that `workers` workers of one host train together, each a slice of it that takes what `slices` says.

    `host_free` is the part of one of them. What a worker has of the other slices is little.
    """
    of_each = longest_trained(budget, slices, config, -(-max_context // workers), host_free, on_gpu)
    return min(workers * of_each, max_context)
