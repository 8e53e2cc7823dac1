"""Divides the memory of the worker's device when all base models are loaded and nothing else is."""

import logging
from collections.abc import Mapping

import torch

from tinsmith.config import Config
from tinsmith.memory.budget import ModelBytes, divide_memory, full_state, longest_together, longest_trained, model_bytes, reserve_of
from tinsmith.memory.cache_sizes import CacheShape, CacheSizes
from tinsmith.memory.pass_memory import pass_memory_of, sliced_pass_memory_of
from tinsmith.models.base import BaseModel
from tinsmith.models.full import full_bytes
from tinsmith.models.machine import free_memory
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sharded_weights import bytes_of

log = logging.getLogger(__name__)


class DeviceMemory:
    """Cache size of each base model, and the length of sequences that train beside it."""

    def __init__(self, bases: Mapping[str, BaseModel], config: Config, group: ProcessGroup | None = None) -> None:
        """Divide what is free now. All workers of a `group` do so at the same time, and share the host's memory."""
        self.bases = bases
        self.config = config
        device = next(iter(bases.values())).device
        self.on_gpu = device.type == "cuda"
        host = free_memory(torch.device("cpu"))
        self.host = _share_of_host(host, group) if group else host
        """Free memory of the host that is this worker's."""
        total = torch.cuda.mem_get_info(device)[1] if self.on_gpu else 0
        free = (free_memory(device) if self.on_gpu else self.host) - reserve_of(self.on_gpu, total)
        sharded = config.shards_weights
        self.passes = {name: pass_memory_of(base.layout, base.text_config, base.dtype, sharded) for name, base in bases.items()}
        rank = config.training.planned_rank
        models = {name: _model_bytes(base, rank, config, group.count if group and sharded else 1) for name, base in bases.items()}
        self.budgets = {name: divide_memory(free, len(bases), models[name], self.passes[name], config, self.on_gpu) for name in bases}

    def cache_sizes(self, name: str) -> CacheSizes:
        """Size of the local sampler's cache. Raises ConfigError if it does not hold one sequence."""
        base = self.bases[name]
        return CacheShape(base.layout.layers, base.dtype, base.device).divide(self.budgets[name].cache, self.config.sampling.max_running)

    def longest_trained(self, name: str) -> int:
        """Return and log the longest sequence that trains on a base model; 0 if nothing is trained (--train none)."""
        if not self.config.training.trains:
            return 0
        base = self.bases[name]
        tokens = longest_trained(self.budgets[name], self.passes[name], self.config, base.max_context, self.host, self.on_gpu)
        if tokens == 0:
            log.warning("%s: the memory of %s has no room to train any sequence; lower --kv-cache-gib", name, base.device)
        elif tokens < base.max_context:
            log.info(
                "%s: sequences of up to %d tokens train, of the %d of its context: then the memory of %s ends (--kv-cache-gib)",
                *(name, tokens, base.max_context, base.device),
            )
        else:
            log.info("%s: sequences of up to %d tokens train, its whole context", name, tokens)
        return tokens

    def longest_together(self, name: str, workers: int) -> int:
        """Return and log the longest sequence that trains if `workers` workers compute it together."""
        base = self.bases[name]
        slices = sliced_pass_memory_of(base.layout, base.text_config, base.dtype, workers)
        tokens = longest_together(self.budgets[name], slices, workers, self.config, base.max_context, self.host, self.on_gpu)
        log.info("%s: sequences of up to %d tokens train on all %d workers together (sequence parallel)", name, tokens, workers)
        return tokens


def _share_of_host(free: int, group: ProcessGroup) -> int:
    """Return each worker's share of its host's free memory; the smallest counts for all."""
    return min(each // workers for each, workers in zip(group.gather(free), group.workers_beside(), strict=True))


def _model_bytes(base: BaseModel, rank: int, config: Config, parts: int) -> ModelBytes:
    """Bytes of one model of the planned rank, whose weights are sharded into `parts` parts."""
    shape = LoraShape(0, seed=0)
    numbers = sum(parameter.numel() for parameter in base.full_targets(shape).values())
    if parts > 1 and rank == 0:
        return model_bytes(base.layout, base.dtype, rank, numbers, bytes_of(base, shape, parts))
    return model_bytes(base.layout, base.dtype, rank, numbers, full_bytes(numbers, base.dtype, full_state(config.training)))
