"""The memory that base models, training and sampling take of a device, before any weight is read.

`plan_base` is the budget of one base model on a worker, `plan_modes` the ways in which several GPUs may train it, and
`make_plan` all that `tinsmith plan` prints. A worker makes the same plan with `plan_beside` once it has loaded the
weights.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError
from tinsmith.memory.budget import (
    BLOCK,
    Budget,
    CacheShape,
    CacheSizes,
    FullBytes,
    ModelBytes,
    computes_together,
    divide_memory,
    full_state,
    most_models,
    reserve_of,
)
from tinsmith.memory.pass_memory import PassMemory, Recomputation
from tinsmith.memory.sizing import Sizes, beside_weights, require_sampler, size_of
from tinsmith.models.full import FullState
from tinsmith.models.layout import Group
from tinsmith.models.machine import Machine, look_around
from tinsmith.models.read_decoder import KNOWN_TYPES
from tinsmith.protocol.devices import gpus_needed, worker_count
from tinsmith.protocol.facts import advertised_context

GIB = 2**30
Mode = Literal["one GPU", "replicas", "sharded"]
"""Replicas hold whole base models; sharded workers hold a slice of every layer (--shard weights)."""


@dataclass(frozen=True)
class DevicePlace:
    """A device that would serve models. Sizes are in bytes."""

    name: str
    on_gpu: bool
    free: int
    """What the server may use (--memory-share)."""
    total: int
    host_free: int
    """Host memory for this worker."""

    @property
    def reserve(self) -> int:
        """Bytes left free of any plan."""
        return reserve_of(self.on_gpu, self.total)


def place_here(sizes: Sizes, machine: Machine, config: Config, workers: int) -> DevicePlace:
    """The device on which each worker would serve the model; of several GPUs the one with least free memory."""
    host = machine.memory_available // workers
    if sizes.device.type == "cpu":
        return DevicePlace("the CPU of this machine", False, host, machine.memory_total, host)
    first = sizes.device.index or 0
    gpu = min(machine.gpus[first : first + workers], key=lambda gpu: gpu.free)
    return DevicePlace(
        f"cuda:{gpu.index}, {gpu.name}",
        True,
        min(gpu.free, int(config.models.memory_share * gpu.total)),
        gpu.total,
        host,
    )


@dataclass(frozen=True)
class BasePlan:
    """Memory that one base model takes of a worker, and what remains."""

    sizes: Sizes
    place: DevicePlace
    config: Config
    workers: int
    model: ModelBytes
    """One trained model of the planned rank."""
    passes: PassMemory
    budget: Budget

    @property
    def cache_shape(self) -> CacheShape:
        """What the local sampler keeps for each token and each sequence."""
        layout = self.sizes.layout
        return CacheShape(layout.layers, self.sizes.dtype, self.sizes.device, layout.experts)

    @property
    def cache(self) -> CacheSizes | None:
        """The local sampler's cache, if there is one. Raises ConfigError if it is too small for one sequence."""
        if self.config.sampling.sampler != "local":
            return None
        return self.cache_shape.divide(self.budget.cache, self.config.sampling.max_running)

    @property
    def recomputation(self) -> Recomputation:
        """Recomputation with which a full pass (--tokens-per-pass) fits; the most there is if none suffices."""
        training = self.config.training
        return (
            self.passes.recomputation_for(training.tokens_per_pass, training.logits_chunk, self.budget.passes)
            or self.passes.smallest
        )

    @property
    def pass_bytes(self) -> int:
        """Bytes of a full pass with that recomputation."""
        return self.passes.bytes(
            self.config.training.tokens_per_pass, self.config.training.logits_chunk, self.recomputation
        )

    @property
    def state_room(self) -> int:
        """Bytes for the state of models in training, beside a full pass that recomputes its layers."""
        training = self.config.training
        least = self.passes.bytes(training.tokens_per_pass, training.logits_chunk, self.passes.smallest)
        return max(0, self.budget.beside_caches - least)

    @property
    def paged_room(self) -> int:
        """Bytes of host memory for LoRA models that the device has no room for (--paged-state-share)."""
        training = self.config.training
        return int(training.paged_state_share * self.place.host_free) if self.place.on_gpu and training.trains else 0

    @property
    def fit(self) -> int:
        """Number of models of the planned rank that train beside weights, cache and a full pass."""
        return self.state_room // self.model.training

    @property
    def in_turns(self) -> int:
        """Number of them that train with those that wait in host memory."""
        if not self.config.training.planned_rank:
            return self.fit
        return most_models(self.model.training, self.state_room, self.paged_room)

    @property
    def longest(self) -> int:
        """The longest sequence that trains on one worker beside everything else, in tokens; 0 if none does."""
        return self._longest(self.passes, self.sizes.max_context)

    @property
    def together(self) -> int:
        """The longest sequence that all workers compute together, each a slice of it, or `longest` where they never do.

        What a worker has of the other slices is little.
        """
        if not computes_together(self.config, self.workers):
            return self.longest
        most = self.sizes.max_context
        of_each = self._longest(self.sizes.passes_of_slices(self.workers), -(-most // self.workers))
        return max(self.longest, min(self.workers * of_each, most))

    def _longest(self, passes: PassMemory, most: int) -> int:
        """The longest sequence, up to `most` tokens; half of the free host memory may hold inputs of its layers."""
        waiting = max(0, self.place.host_free - self.budget.host) // 2 if self.place.on_gpu else 0
        return passes.longest(self.config.training.logits_chunk, self.budget.passes, waiting, most)


def plan_base(sizes: Sizes, others: Sequence[Sizes], place: DevicePlace, config: Config, workers: int) -> BasePlan:
    """The plan of a base model beside the `others` of each worker, before their weights are loaded."""
    bases = (sizes, *others)
    left = beside_weights(place.free - place.reserve, bases, config)
    return plan_beside(left, sizes, len(bases), place, config, workers)


def plan_beside(left: int, sizes: Sizes, bases: int, place: DevicePlace, config: Config, workers: int) -> BasePlan:
    """The plan of one of `bases` base models, whose weights leave `left` bytes, for `config`'s rank and state."""
    model, passes = sizes.model(config.training.planned_rank, full_state(config.training)), sizes.passes
    return BasePlan(
        sizes, place, config, workers, model, passes, divide_memory(left, bases, model, passes, config, place.on_gpu)
    )


# ---- Ways to train on several GPUs


@dataclass(frozen=True)
class ModePlan:
    """One way of training. Sizes are bytes of each worker."""

    mode: Mode
    trains: str
    """An adapter, or all weights with their state."""
    settings: str
    """Options of `tinsmith serve` that plan for it."""
    weight_bytes: int
    """The frozen base model."""
    model_bytes: int
    """Weights, gradients and moments of one trained model."""
    cache_bytes: int
    """The local sampler's cache; 0 without it."""
    longest_sequence: int
    """The longest sequence that trains on one worker, in tokens; 0 if none does."""
    longest_together: int
    """Tokens of the longest that all workers compute together; the same where they never do."""
    fits: bool
    """Whether a full pass of one sequence fits, and the host's share of the state."""


def plan_modes(
    sizes: Sizes, place: DevicePlace, config: Config, rank: int, workers: int, others: Sequence[Sizes] = ()
) -> list[ModePlan]:
    """The ways to train an adapter of this rank, and all weights, on so many workers.

    `others` are the base models that the same workers hold beside this one, each with a cache of its own.
    """
    whole: Mode = "replicas" if workers > 1 else "one GPU"
    replicated = dataclasses.replace(config, distributed=dataclasses.replace(config.distributed, shard="none"))
    modes = [
        _plan_mode(sizes, others, place, replicated, whole, workers, *training)
        for training in _trainings(rank, place.on_gpu, sizes)
    ]
    # --shard is one setting for all base models
    if workers > 1 and all(can_be_sharded(each) for each in (sizes, *others)):
        sampler = "vllm" if config.sampling.sampler == "vllm" else "none"  # no local one has all weights
        parts, *beside = (dataclasses.replace(each, parts=workers) for each in (sizes, *others))
        sampling = dataclasses.replace(config.sampling, sampler=sampler)
        settings = dataclasses.replace(
            config, sampling=sampling, distributed=dataclasses.replace(config.distributed, shard="weights")
        )
        ranks = [each for each in dict.fromkeys((rank, 0)) if each or sizes.expert_format is None]
        modes += [_plan_mode(parts, beside, place, settings, "sharded", workers, each, "float32") for each in ranks]
    return modes


def can_be_sharded(sizes: Sizes) -> bool:
    """Whether workers may shard the layers (--shard weights)."""
    return sizes.layout.family.model_type in KNOWN_TYPES


def _trainings(rank: int, on_gpu: bool, sizes: Sizes) -> Iterator[tuple[int, FullState]]:
    if rank:
        yield rank, "float32"
    if sizes.expert_format is not None:
        return
    yield 0, "float32"
    yield 0, "compact"
    if on_gpu:
        yield 0, "compact-host"


def _plan_mode(
    sizes: Sizes,
    others: Sequence[Sizes],
    place: DevicePlace,
    config: Config,
    mode: Mode,
    workers: int,
    rank: int,
    state: FullState,
) -> ModePlan:
    training = dataclasses.replace(config.training, planned_rank=rank, full_state=state)
    planned = plan_base(sizes, others, place, dataclasses.replace(config, training=training), workers)
    longest = planned.longest
    trains = f"LoRA of rank {rank}" if rank else f"all weights, {state}"
    host_has_room = bool(rank) or sizes.full(state).host <= place.host_free
    return ModePlan(
        mode=mode,
        trains=trains,
        settings=f"--planned-rank {rank}"
        + ("" if rank else f" --full-state {state}")
        + (f" --shard weights --sampler {config.sampling.sampler}" if mode == "sharded" else ""),
        weight_bytes=sizes.weight_bytes,
        model_bytes=planned.model.training,
        cache_bytes=planned.budget.cache,
        longest_sequence=longest,
        longest_together=planned.together,
        fits=host_has_room and longest >= min(training.tokens_per_pass, sizes.max_context),
    )


# ---- The whole plan


@dataclass(frozen=True)
class CachePlan:
    """The local sampler's cache (--kv-cache-gib)."""

    bytes: int
    blocks: int
    tokens: int
    state_slots: int
    """States of gated delta nets, one for each sequence; 0 without such layers."""
    state_bytes: int


@dataclass(frozen=True)
class AdaptersPlan:
    """Trained adapters."""

    bytes_each: int
    """Weights, gradients and moments."""
    snapshot_bytes: int
    fit: int
    """Number that fits beside weights, cache and a pass that recomputes its layers."""
    in_turns: int
    """Number that trains with those that wait in host memory (--paged-state-share)."""


@dataclass(frozen=True)
class FullPlan:
    """Training of all parameters (rank 0), beside weights, cache and pass."""

    state: FullState
    parts: FullBytes
    free_bytes: int
    needed_bytes: int
    fits: bool


@dataclass(frozen=True)
class SequencePlan:
    """The longest sequence that trains with one adapter, in tokens."""

    tokens: int
    limit: Literal["memory", "context"]
    """What limits it: memory, or --max-context."""
    together: int
    """The longest that all workers compute together, or `tokens` where they never do."""


@dataclass(frozen=True)
class Plan:
    """What `tinsmith plan` prints. Sizes are in bytes."""

    model: str
    architecture: str
    parameters: int
    rank: int
    lora_parameters: dict[Group, int]
    """Parameters of an adapter, by the switches of `create_lora_training_client`."""
    dtype: str
    expert_dtype: str
    """How experts of a mixture are held (--expert-dtype)."""
    device: str
    memory_bytes: int
    """What the server may use (--memory-share)."""
    weight_bytes: int
    """The frozen base model."""
    reserve_bytes: int
    """Left free for libraries, captured graphs, images and steps of the sampler."""
    pass_tokens: int
    pass_bytes: int
    largest_pass_tokens: int
    """The largest pass that fits beside one model, up to `pass_tokens`."""
    recomputed_layers: int
    """Layers that such a pass recomputes to fit beside one adapter."""
    cache: CachePlan | None
    adapters: AdaptersPlan
    full_parameters: FullPlan | None
    """None with quantized experts (--expert-dtype), which cannot be trained."""
    longest_sequence: SequencePlan
    advertised_context: int | None
    """`max_context_length` that clients are told; None with vLLM."""
    workers: int
    """All sizes are those of one of them."""
    modes: list[ModePlan]
    fits: bool
    """Whether at least one adapter can be trained."""
    advice: str | None
    """A setting with which one can, if none can without."""


def make_plan(config: Config, rank: int, memory_gib: float | None) -> Plan:
    """The plan for the one base model of `config`, on GPUs of this memory, or for None on this machine's devices.

    GPUs that need not be here have a host with as much memory as all of them. Raises ConfigError for a model that
    cannot be read or served, and for rank 0 with quantized experts.
    """
    if rank == 0 and config.models.expert_dtype != "model":
        raise ConfigError(
            "--rank 0 trains all parameters, and experts are not trained with --expert-dtype "
            f"{config.models.expert_dtype}; leave one of them out"
        )
    ((name, source),) = base_model_sources(config).items()
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, planned_rank=rank))
    if memory_gib is None:
        machine = look_around()
        workers = worker_count(config, usable=len(machine.gpus))
        sizes = size_of(source, config.models)
        place = place_here(sizes, machine, config, workers)
    else:
        workers = worker_count(config, gpus_needed(config))
        dtype = "bfloat16" if config.models.dtype == "auto" else config.models.dtype
        # Of a GPU that need not be here
        sizes = size_of(source, dataclasses.replace(config.models, device="cpu", dtype=dtype))
        memory = int(memory_gib * GIB)
        place = DevicePlace(
            "a GPU (--memory-gib)", True, int(config.models.memory_share * memory), memory, host_free=memory
        )
    require_sampler(name, sizes.layout, config)
    modes = plan_modes(sizes, place, config, rank, workers)
    if config.shards_weights:
        if not can_be_sharded(sizes):
            raise ConfigError(
                f"--shard weights: Tinsmith does not divide the layers of {sizes.layout.family.model_type}; "
                "leave it out"
            )
        sizes = dataclasses.replace(sizes, parts=workers)
    planned = plan_base(sizes, (), place, config, workers)
    state, passes = full_state(config.training), planned.passes
    cache = _cache_of(planned)
    tokens, chunk = config.training.tokens_per_pass, config.training.logits_chunk
    longest, together = planned.longest, planned.together
    beside, fit = planned.state_room, planned.fit
    full = None
    if sizes.expert_format is None:
        parts = sizes.full(state)
        full = FullPlan(state, parts, beside, parts.device, parts.device <= beside)
    return Plan(
        model=name,
        architecture=sizes.layout.family.model_type,
        parameters=sizes.parameters,
        rank=rank,
        lora_parameters=sizes.layout.group_parameters(rank),
        dtype=str(sizes.dtype).removeprefix("torch."),
        expert_dtype=config.models.expert_dtype,
        device=place.name,
        memory_bytes=place.free,
        weight_bytes=sizes.weight_bytes,
        reserve_bytes=place.reserve,
        pass_tokens=tokens,
        pass_bytes=planned.pass_bytes,
        largest_pass_tokens=passes.longest(chunk, planned.budget.passes, 0, tokens),
        recomputed_layers=planned.recomputation.recompute,
        cache=cache,
        adapters=AdaptersPlan(planned.model.training, planned.model.snapshot, fit, planned.in_turns),
        full_parameters=full,
        longest_sequence=SequencePlan(longest, "memory" if longest < sizes.max_context else "context", together),
        advertised_context=_advertised(config, sizes.max_context, cache, together),
        workers=workers,
        modes=modes,
        fits=fit > 0,
        advice=None if fit else _advice(planned),
    )


def _advice(planned: BasePlan) -> str | None:
    """The setting with which an adapter fits; None if there is none."""
    smaller = planned.sizes.with_fp8
    if smaller is None or not planned.config.training.planned_rank:
        return None
    with_it = plan_base(smaller, (), planned.place, planned.config, planned.workers)
    return "--expert-dtype fp8" if with_it.state_room >= with_it.model.training else None


def _cache_of(planned: BasePlan) -> CachePlan | None:
    sizes = planned.cache
    if sizes is None:
        return None
    return CachePlan(
        planned.budget.cache, sizes.blocks, sizes.blocks * BLOCK, sizes.slots, planned.cache_shape.state_bytes
    )


def _advertised(config: Config, max_context: int, cache: CachePlan | None, trained: int) -> int | None:
    if config.sampling.sampler == "vllm":
        return None
    return advertised_context(trained, max_context if cache is None else min(max_context, cache.tokens))
