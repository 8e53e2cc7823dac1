"""Makes what a worker trains and samples its base models with, from the configuration."""

import logging
from collections.abc import Callable, Mapping

from tinsmith.config import Config
from tinsmith.memory.budget import computes_together
from tinsmith.models.base import BaseModel
from tinsmith.models.machine import size_text
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.training.backend import LocalBackend
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sequence_parallel import SHORTEST_SLICE
from tinsmith.training.parallel.sharded_backend import ShardedBackend
from tinsmith.training.parallel.sharded_layers import shard
from tinsmith.worker.device_memory import DeviceMemory
from tinsmith.worker.device_turns import Sleeper
from tinsmith.worker.passes import TrainingBase
from tinsmith.worker.sampling_base import SamplingBase

log = logging.getLogger(__name__)


def backend_of(base: BaseModel, config: Config, group: ProcessGroup | None) -> LocalBackend:
    """Return the trainer of a base model, whose layers `--shard weights` first shards over the group."""
    if group is None or not config.shards_weights:
        return LocalBackend(base, config.training, group, config.sampling.eager)
    shard(base, group)
    return ShardedBackend(base, config.training, group, gives_snapshots=config.compares_with_copy)


def training_base(
    backend: LocalBackend, renderer: Renderer, config: Config, memory: DeviceMemory, group: ProcessGroup | None
) -> TrainingBase:
    """Return the trainer of a base model, with the lengths that train on this worker alone and on all together."""
    base = backend.base
    alone = memory.longest_trained(base.name)
    if group is None or not computes_together(config, group.count):
        return TrainingBase(backend, renderer, alone)
    together = memory.longest_together(base.name)
    configured = config.training.sequence_parallel_from
    longest_alone = max(min(alone, configured - 1) if configured else alone, SHORTEST_SLICE * group.count - 1)
    return TrainingBase(backend, renderer, together, longest_alone, group.count)


def local_samplers(
    bases: Mapping[str, BaseModel], renderers: Mapping[str, Renderer], config: Config, memory: DeviceMemory
) -> dict[str, SamplingBase]:
    """Return samplers that compute with the training weights."""
    sampled: dict[str, SamplingBase] = {}
    for name, base in bases.items():
        sampler = LocalSampler(base, config.sampling, config.training.logits_chunk, memory.cache_sizes(name))
        log.info("%s: the cache of %s (--kv-cache-gib) holds %s", name, size_text(memory.plans[name].budget.cache), sampler.capacity())
        sampled[name] = SamplingBase(sampler, renderers[name])
    return sampled


def vllm_samplers(
    bases: Mapping[str, BaseModel], renderers: Mapping[str, Renderer], config: Config, wake: Callable[[], None]
) -> tuple[dict[str, SamplingBase], list[Sleeper]]:
    """Start vLLM servers, which compute with copies of the weights; returns their samplers, also as what takes turns with training."""
    from tinsmith.sampling.vllm.sampler import start_vllm_sampler  # needs packages that are not there without vLLM

    started = {name: start_vllm_sampler(base, renderers[name], config, wake) for name, base in bases.items()}
    return {name: SamplingBase(sampler, renderers[name]) for name, sampler in started.items()}, list(started.values())
