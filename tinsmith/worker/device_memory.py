"""Divides the memory of the worker's device when all base models are loaded and nothing else is."""

import logging
from collections.abc import Mapping, Sequence

import torch

from tinsmith.config import Config
from tinsmith.memory.budget import CacheSizes
from tinsmith.memory.plan import DevicePlace, plan_beside
from tinsmith.memory.sizing import column_bytes, loaded_sizes
from tinsmith.models.base import BaseModel
from tinsmith.models.machine import free_memory, size_text
from tinsmith.training.model_memory import ModelMemory
from tinsmith.training.paged_state import StatePager
from tinsmith.training.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)


class DeviceMemory:
    """Cache size of each base model, and the length of sequences that train beside it."""

    def __init__(self, bases: Mapping[str, BaseModel], config: Config, group: ProcessGroup | None = None) -> None:
        """Divide what is free now. All workers of a `group` do so at the same time, and share the host's memory."""
        device = next(iter(bases.values())).device
        on_gpu, host = device.type == "cuda", free_memory(torch.device("cpu"))
        self.host = _share_of_host(host, group) if group else host
        """Free memory of the host that is this worker's."""
        total = torch.cuda.mem_get_info(device)[1] if on_gpu else 0
        place = DevicePlace(str(device), on_gpu, free_memory(device) if on_gpu else self.host, total, self.host)
        workers = group.count if group else 1
        sizes = {name: loaded_sizes(base, workers if config.shards_weights else 1) for name, base in bases.items()}
        left = place.free - place.reserve - column_bytes(sizes.values(), config)
        self.device = device
        self.plans = {name: plan_beside(left, own, len(bases), place, config, workers) for name, own in sizes.items()}

    def cache_sizes(self, name: str) -> CacheSizes:
        """Size of the local sampler's cache. Raises ConfigError if it does not hold one sequence."""
        sizes = self.plans[name].cache
        assert sizes is not None, "there is a local sampler"
        return sizes

    @property
    def paged_room(self) -> int:
        """Bytes of host memory for LoRA models that the device has no room for; 0 if none is ever paged out."""
        return max(plan.paged_room for plan in self.plans.values())

    @property
    def state_room(self) -> int:
        """Bytes of the device for the state of models in training, beside a pass of any base model."""
        return min(plan.state_room for plan in self.plans.values())

    def pager(self, memories: Sequence[ModelMemory], group: ProcessGroup | None = None) -> StatePager:
        """Let the models of all bases share one pager, and return it. All workers of a `group` get the same room."""
        room, host_room = self.state_room, self.paged_room
        if group is not None:
            room = min(group.gather(room))
        if host_room == 0:
            pager = StatePager(self.device)
        else:
            spare = max(plan.budget.beside_caches - plan.state_room for plan in self.plans.values())
            pager = StatePager(
                self.device,
                room,
                host_room,
                lambda: free_memory(self.device) - spare - sum(each.promised() for each in memories),
            )
            log.info(
                "LoRA models take up to %s of %s in training, and of host memory %s (--paged-state-share)",
                *(size_text(room), self.device, size_text(host_room)),
            )
        for each in memories:
            each.pager = pager
        return pager

    def longest_trained(self, name: str) -> int:
        """Return and log the longest sequence that trains on a base model; 0 if nothing is trained (--train none)."""
        plan = self.plans[name]
        if not plan.config.training.trains:
            return 0
        tokens, most = plan.longest, plan.sizes.max_context
        if tokens == 0:
            log.warning(
                "%s: the memory of %s has no room to train any sequence; lower --kv-cache-gib", name, plan.place.name
            )
        elif tokens < most:
            log.info(
                (
                    "%s: sequences of up to %d tokens train, of the %d of its context: "
                    "then the memory of %s ends (--kv-cache-gib)"
                ),
                *(name, tokens, most, plan.place.name),
            )
        else:
            log.info("%s: sequences of up to %d tokens train, its whole context", name, tokens)
        return tokens

    def longest_together(self, name: str) -> int:
        """Return and log the longest sequence that trains if all workers compute it together."""
        plan = self.plans[name]
        tokens = plan.together
        log.info(
            "%s: sequences of up to %d tokens train on all %d workers together (sequence parallel)",
            name,
            tokens,
            plan.workers,
        )
        return tokens


def _share_of_host(free: int, group: ProcessGroup) -> int:
    """Return each worker's share of its host's free memory; the smallest counts for all."""
    return min(each // workers for each, workers in zip(group.gather(free), group.workers_beside(), strict=True))
