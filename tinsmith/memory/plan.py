"""The plan of a device: LoRA's parameters, what fits, and how long a sequence trains in each mode. No weight is read."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from tinsmith.config import Config, ModelsConfig, base_model_sources
from tinsmith.engine.devices import gpus_needed, worker_count
from tinsmith.errors import ConfigError
from tinsmith.memory.base_plan import BasePlan, DevicePlace, place_here, plan_base
from tinsmith.memory.modes import ModePlan, can_be_sharded, plan_modes
from tinsmith.models.budget import full_state
from tinsmith.models.full import FullBytes, FullState
from tinsmith.models.layout import Group
from tinsmith.models.machine import look_around
from tinsmith.models.sizing import beside_weights, size_of
from tinsmith.protocol.facts import advertised_context
from tinsmith.sampling.prefix import BLOCK

GIB = 2**30


@dataclass(frozen=True)
class CachePlan:
    """Size of the local sampler's cache (--kv-cache-gib)."""

    bytes: int
    blocks: int
    """Blocks of keys and values."""
    tokens: int
    """Tokens in all of these blocks."""
    state_slots: int
    """States of sequences, one for all gated delta nets of the model; 0 if it has none."""
    state_bytes: int
    """One of these states."""


@dataclass(frozen=True)
class AdaptersPlan:
    """Adapters that are trained."""

    bytes_each: int
    """Weights, accumulated gradients and what AdamW remembers."""
    snapshot_bytes: int
    """A frozen copy to sample from."""
    fit: int
    """Number that fit beside weights, cache and a pass that recomputes its layers."""


@dataclass(frozen=True)
class FullPlan:
    """Training of all parameters (rank 0), beside weights, cache and pass."""

    state: FullState
    """State that is kept for each weight (--full-state)."""
    parts: FullBytes
    """Bytes of that state."""
    free_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes of the device that it needs."""
        return self.parts.device

    @property
    def fits(self) -> bool:
        """Whether one such model can be trained."""
        return self.needed_bytes <= self.free_bytes


@dataclass(frozen=True)
class SequencePlan:
    """The longest sequence that trains with one adapter, in a pass of its own."""

    tokens: int
    limit: Literal["memory", "context"]
    """Limit of the length: memory, or the model's context (--max-context)."""
    together: int
    """The longest that all workers compute together, each a slice of it; where that is never done, it is `tokens`."""


@dataclass(frozen=True)
class Plan:
    """The whole answer. Sizes are in bytes, and passes are estimated."""

    model: str
    architecture: str
    parameters: int
    rank: int
    lora_parameters: dict[Group, int]
    """Parameters of an adapter of this rank, by the switches of `create_lora_training_client`."""
    dtype: str
    device: str
    memory_bytes: int
    """Bytes that the server may use (--memory-share), of all that the device has or, on this machine, of what is free."""
    weight_bytes: int
    """The frozen base model."""
    reserve_bytes: int
    """Bytes left free for libraries, captured graphs, images and steps of the sampler."""
    pass_tokens: int
    """The largest pass of several sequences (--tokens-per-pass)."""
    pass_bytes: int
    """Bytes that such a pass takes."""
    largest_pass_tokens: int
    """The largest pass that fits beside one model; no more than `pass_tokens`."""
    recomputed_layers: int
    """Number of layers that such a pass must recompute to fit beside one adapter."""
    cache: CachePlan | None
    """None without the local sampler."""
    adapters: AdaptersPlan
    full_parameters: FullPlan
    longest_sequence: SequencePlan
    advertised_context: int | None
    """Length that clients are told (`max_context_length`): it trains and can be sampled. None with vLLM."""
    workers: int
    """Number of workers that train together (--workers). All sizes are those of one of them."""
    modes: list[ModePlan]
    """Ways to train on that many workers."""

    @property
    def fits(self) -> bool:
        """Whether the model can be served and trained with LoRA at all."""
        return self.adapters.fit > 0


def make_plan(config: Config, rank: int, memory_gib: float | None) -> Plan:
    """The plan for the one base model of `config`, on GPUs of this memory; None means the devices that this machine would serve it on.

    GPUs that need not be here have a host with as much memory as all of them. Raises ConfigError if the configuration of the model cannot
    be read, or if it could not be served.
    """
    ((name, source),) = base_model_sources(config).items()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, planned_rank=rank))
    if memory_gib is None:
        machine = look_around()
        workers = worker_count(config, usable=len(machine.gpus))
        sizes = size_of(source, config.models)
        place = place_here(sizes, machine, config, workers)
    else:
        workers = worker_count(config, gpus_needed(config))
        sizes = size_of(source, _on_a_gpu(config.models))
        memory = int(memory_gib * GIB)
        place = DevicePlace("a GPU (--memory-gib)", True, int(config.models.memory_share * memory), memory, host_free=memory)
    modes = plan_modes(sizes, place, config, rank, workers)
    if config.shards_weights:
        if not can_be_sharded(sizes):
            raise ConfigError(f"--shard weights: Tinsmith does not divide the layers of {sizes.layout.family.model_type}; leave it out")
        sizes = dataclasses.replace(sizes, parts=workers)
    planned = plan_base(sizes, (), place, config, workers)
    state, passes, cache = full_state(config.training), planned.passes, _cache_of(planned)
    tokens, chunk = config.training.tokens_per_pass, config.training.logits_chunk
    longest, together = planned.longest, planned.together
    left = beside_weights(place.free - place.reserve, [sizes]) - planned.budget.cache
    beside = max(0, left - passes.bytes(tokens, chunk, passes.smallest))
    return Plan(
        model=name,
        architecture=sizes.layout.family.model_type,
        parameters=sizes.parameters,
        rank=rank,
        lora_parameters=sizes.layout.group_parameters(rank),
        dtype=str(sizes.dtype).removeprefix("torch."),
        device=place.name,
        memory_bytes=place.free,
        weight_bytes=sizes.weight_bytes,
        reserve_bytes=place.reserve,
        pass_tokens=tokens,
        pass_bytes=planned.pass_bytes,
        largest_pass_tokens=passes.longest(chunk, planned.budget.passes, 0, tokens),
        recomputed_layers=planned.recomputation.recompute,
        cache=cache,
        adapters=AdaptersPlan(planned.model.training, planned.model.snapshot, beside // planned.model.training),
        full_parameters=FullPlan(state, sizes.full(state), beside),
        longest_sequence=SequencePlan(longest, "memory" if longest < sizes.max_context else "context", together),
        advertised_context=_advertised(config, sizes.max_context, cache, together),
        workers=workers,
        modes=modes,
    )


def _cache_of(planned: BasePlan) -> CachePlan | None:
    """Return the size of the cache; None without the local sampler."""
    sizes = planned.cache
    if sizes is None:
        return None
    return CachePlan(planned.budget.cache, sizes.blocks, sizes.blocks * BLOCK, sizes.slots, planned.cache_shape.state_bytes)


def _advertised(config: Config, max_context: int, cache: CachePlan | None, trained: int) -> int | None:
    """Return the length that clients are told, if sequences of `trained` tokens train."""
    if config.sampling.sampler == "vllm":
        return None
    return advertised_context(trained, max_context if cache is None else min(max_context, cache.tokens))


def _on_a_gpu(models: ModelsConfig) -> ModelsConfig:
    """The settings with which a GPU, which need not be here, would serve a model."""
    return dataclasses.replace(models, device="cpu", dtype="bfloat16" if models.dtype == "auto" else models.dtype)
