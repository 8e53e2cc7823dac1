"""The budget of one base model on one worker: what plan, doctor and the choice of a mode compute sizes with.

A worker divides its memory with the same functions (`models/budget.py`) when it has loaded the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.config import Config
from tinsmith.models.budget import (
    Budget,
    ModelBytes,
    computes_together,
    divide_memory,
    full_state,
    longest_together,
    longest_trained,
    reserve_of,
)
from tinsmith.models.machine import Machine
from tinsmith.models.pass_memory import PassMemory, Recomputation
from tinsmith.models.sizing import Sizes, beside_weights
from tinsmith.sampling.local.kv_cache import CacheShape, CacheSizes


@dataclass(frozen=True)
class DevicePlace:
    """A device on which a worker would serve models, and memory in bytes."""

    name: str
    on_gpu: bool
    free: int
    """Bytes of the device that the server may use (--memory-share)."""
    total: int
    host_free: int
    """This worker's part of the host's memory."""

    @property
    def reserve(self) -> int:
        """Bytes that are left free of any plan."""
        return reserve_of(self.on_gpu, self.total)


def place_here(sizes: Sizes, machine: Machine, config: Config, workers: int) -> DevicePlace:
    """The device of this machine on which each of so many workers would serve the model; of several the one with least free memory."""
    host = machine.memory_available // workers
    if sizes.device.type == "cpu":
        return DevicePlace("the CPU of this machine", False, host, machine.memory_total, host)
    first = sizes.device.index or 0
    gpu = min(machine.gpus[first : first + workers], key=lambda gpu: gpu.free)
    return DevicePlace(f"cuda:{gpu.index}, {gpu.name}", True, min(gpu.free, int(config.models.memory_share * gpu.total)), gpu.total, host)


@dataclass(frozen=True)
class BasePlan:
    """Memory that one base model takes of a worker, and what remains for training."""

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
        """Bytes that the local sampler keeps for each token and each sequence."""
        return CacheShape(self.sizes.layout.layers, self.sizes.dtype, self.sizes.device)

    @property
    def cache(self) -> CacheSizes | None:
        """Size of the local sampler's cache; None without it. Raises ConfigError if it is too small for one sequence."""
        if self.config.sampling.sampler != "local":
            return None
        return self.cache_shape.divide(self.budget.cache, self.config.sampling.max_running)

    @property
    def recomputation(self) -> Recomputation:
        """Recomputation that a full pass (--tokens-per-pass) needs to fit; the most there is if it does not fit."""
        training = self.config.training
        return self.passes.recomputation_for(training.tokens_per_pass, training.logits_chunk, self.budget.passes) or self.passes.smallest

    @property
    def pass_bytes(self) -> int:
        """Bytes that a full pass takes with that recomputation."""
        return self.passes.bytes(self.config.training.tokens_per_pass, self.config.training.logits_chunk, self.recomputation)

    @property
    def longest(self) -> int:
        """The longest sequence that trains on one worker, in tokens; 0 if none does."""
        return longest_trained(self.budget, self.passes, self.config, self.sizes.max_context, self.place.host_free, self.place.on_gpu)

    @property
    def together(self) -> int:
        """The longest that all workers compute together, each a slice of it; where that is never done, it is `longest`."""
        if not computes_together(self.config, self.workers):
            return self.longest
        slices, place = self.sizes.passes_of_slices(self.workers), self.place
        sliced = longest_together(self.budget, slices, self.workers, self.config, self.sizes.max_context, place.host_free, place.on_gpu)
        return max(self.longest, sliced)


def plan_base(sizes: Sizes, others: Sequence[Sizes], place: DevicePlace, config: Config, workers: int) -> BasePlan:
    """The budget of a base model beside the `others` that each worker holds too, for the planned rank and kind of state."""
    bases = (sizes, *others)
    model = sizes.model(config.training.planned_rank, full_state(config.training))
    left = beside_weights(place.free - place.reserve, bases)
    budget = divide_memory(left, len(bases), model, sizes.passes, config, place.on_gpu)
    return BasePlan(sizes, place, config, workers, model, sizes.passes, budget)
