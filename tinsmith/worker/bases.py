"""The base models of a worker: loaded, where they have room, and shown to compute what they should before anything is served."""

import logging
import time
from collections.abc import Mapping

import torch

from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel, load_base_model, loading_of, loading_to_compare, pick_device
from tinsmith.models.budget import GIB
from tinsmith.models.machine import free_memory, limit_memory, size_text
from tinsmith.models.sizing import size_of
from tinsmith.sampling.self_check import check_base_model
from tinsmith.training.divided_decoder import require_divisible

log = logging.getLogger(__name__)

WHOLE_BASE = 1.1
"""How many times its size a base model takes of a device on which it lies as a whole while it is divided."""


def stays_on_host(source: str, config: Config) -> bool:
    """Whether the layers of a base model that is to be divided wait in the host's memory, because the device has no room for all of them.

    On a GPU that has room, the self-check takes seconds in place of minutes. A CPU has the same memory, where several workers share pages.
    """
    if not config.divides:
        return False
    device = pick_device(config.models.device)
    if device.type == "cpu":
        return True
    limit_memory(device, config.models.memory_share)
    return free_memory(device) < WHOLE_BASE * size_of(source, config.models).weight_bytes + GIB


def load_bases(config: Config) -> dict[str, BaseModel]:
    """Every base model of the configuration, by name, once it has passed its self-check.

    Raises ConfigError as `load_base_model` and `check_base_model` do.
    """
    features = config.images.image_cache_mib * 2**19  # the other half is for pixel values
    loading = loading_of(config)
    if config.only_compares:
        log.info("base models go into the host's memory: nothing is trained, and what vLLM servers compute is compared with them")
    bases: dict[str, BaseModel] = {}
    for name, source in base_model_sources(config).items():
        started = time.monotonic()
        log.info("loading %s from %s ...", name, source)
        base = bases[name] = load_base_model(name, source, loading, features, stays_on_host(source, config))
        if config.divides:
            require_divisible(base)
        log.info("loaded %s (%s) on %s in %s, %.1f s", name, base.family.model_type, base.device, base.dtype, time.monotonic() - started)
    for base in bases.values():
        _check(base, samples=config.sampling.sampler == "local")
    return bases


def load_compared(config: Config, bases: Mapping[str, BaseModel]) -> dict[str, BaseModel]:
    """Whole copies of base models whose layers are about to be divided, in the host's memory; none where these are whole themselves.

    They take the trainer's place in what vLLM servers are compared with, and are what adapters are merged into. Their layers are mapped
    pages of their files, if these are in the precision that is served. Raises ConfigError if the host has no room for them.
    """
    compared: dict[str, BaseModel] = {}
    if not config.compares_with_copy:
        return compared
    loading, sources = loading_to_compare(config), base_model_sources(config)
    size = sum(size_of(source, loading).weight_bytes for source in sources.values())
    free = free_memory(torch.device("cpu"))
    if size > free:  # mapped pages too are read again for each canary if they do not stay in memory
        raise ConfigError(
            f"--shard weights and --sampler vllm: the copies of {', '.join(sources)} with which vLLM servers are compared need "
            f"{size_text(size)} of the host's memory, of which {size_text(free)} are free; free some, or use --sampler none"
        )
    for name, source in sources.items():
        started = time.monotonic()
        base = compared[name] = load_base_model(name, source, loading, config.images.image_cache_mib * 2**19, layers_on_host=True)
        base.computed_fingerprint = bases[name].computed_fingerprint
        log.info("loaded %s once more into the host's memory, to compare vLLM servers with it, %.1f s", name, time.monotonic() - started)
        _check(base, samples=False)
    return compared


def _check(base: BaseModel, samples: bool) -> None:
    started = time.monotonic()
    check_base_model(base, samples=samples)
    log.info("%s passes its self-check on %s, %.1f s", base.name, base.device, time.monotonic() - started)
