"""`tinsmith serve` and `tinsmith warm`: checks the configuration as a whole, and runs a server."""

import importlib.util
import os
import resource
from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tinsmith.config import Config, base_model_sources, load, settings
from tinsmith.config_values import installer
from tinsmith.errors import ConfigError
from tinsmith.server.engine_program import EngineProgram

_OPEN_FILES = 65536
"""Limit on open files to ask for: connections of three clients reach the usual 1024."""


def serve(config: Config) -> None:
    """Serve until Ctrl-C. Raises ConfigError before anything slow is imported."""
    _require_servable(config)
    _allow_open_files()
    with closing(EngineProgram()) as engine:  # it imports what it needs beside us
        from tinsmith.server.main import run_server

        run_server(config, engine)


def warm(config: Config) -> float:
    """Start as `serve` until the engine is ready; returns the seconds it took.

    Raises ConfigError as `serve`, and with vLLM servers, which are not ready when the engine is.
    """
    if config.sampling.sampler == "vllm":
        raise ConfigError(
            "warm is not possible with sampler=vllm, whose servers compile at their own first start; use --sampler none"
        )
    _require_servable(config)
    _allow_open_files()
    with closing(EngineProgram()) as engine:
        from tinsmith.server.main import warm_up

        return warm_up(config, engine)


def _require_servable(config: Config) -> None:
    sources = base_model_sources(config)
    from tinsmith.models.files import require_found, require_usable

    require_usable(sources.values(), whole=True)
    from tinsmith.protocol.devices import require_device, visible_gpus, worker_count
    from tinsmith.sampling.vllm.options import require_vllm

    if not config.distributed.ray_address:
        require_device(config.models.device)
    # The engine asks again, and PyTorch too; here what it refuses is said before anything starts.
    workers = worker_count(config, usable=visible_gpus())
    require_vllm(config)  # before the next imports, which take a second
    for source in sources.values():
        require_found(source)
    from tinsmith.memory.shard_choice import chosen_shard

    config.distributed.shard = chosen_shard(config, workers)


def _allow_open_files() -> None:
    """Raise the limit for this process and those that it starts from now on. A fork server serves equal limits only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def configuration_of(file: Path | None, options: dict[str, Any]) -> Config:
    """The configuration of `serve`, `doctor` and `plan`. Raises ConfigError as `load`, and for idle options."""
    given = {name: value for name, value in options.items() if value is not None}
    config = load(file, given, os.environ)
    for problem in _contradictions(config, given.keys()):
        raise ConfigError(problem)
    return config


def _contradictions(config: Config, given: Collection[str]) -> Iterator[str]:
    """Each setting that is impossible, or idle, beside others. `given` are the names of options."""
    sampler, trains = config.sampling.sampler, config.training.trains
    unused = [each.option for each in settings() if each.path[0] == "vllm" and each.name in given]
    if sampler != "vllm" and unused:
        yield f"{', '.join(unused)} has no effect with sampler={sampler}; add --sampler vllm, or leave it out"
    idle = [
        each.option
        for each in settings()
        if each.path[0] == "training" and each.name in set(given) - {"train", "logits_chunk"}
    ]
    if not trains and idle:
        yield f"{', '.join(idle)} has no effect with train=none; leave it out, or let the server train"
    if not trains and sampler == "none":
        yield "train=none is not possible with sampler=none: nothing would be left to serve"
    if config.only_compares and config.vllm.vllm_urls and config.models.memory_share != 1:
        share = f"memory_share={config.models.memory_share:g}"
        yield f"{share} has no effect with train=none and vllm_urls, with which this server uses no GPU; leave it out"
    if config.training.sequence_parallel_from and config.shards_weights:
        yield f"sequence_parallel_from is not possible with shard={config.distributed.shard}; leave one of them out"
    yield from _contradict_models(config)
    if config.vllm.vllm_turn_s:
        yield from _contradict_turns(config)
    if config.distributed.ray_address:
        yield from _contradict_ray(config)


def _contradict_models(config: Config) -> Iterator[str]:
    if config.training.sequence_parallel_from and config.models.deterministic:
        yield (
            "sequence_parallel_from is not possible with deterministic=True, which computes each sequence on one worker"
        )
    if config.training.trains and config.models.expert_dtype != "model" and not config.training.planned_rank:
        yield (
            f"planned_rank=0 plans for training of all parameters, of which expert_dtype={config.models.expert_dtype} "
            "keeps no experts that can be trained; leave one of them out"
        )
    if config.sampling.sampler == "vllm" and config.models.deterministic:
        yield (
            "deterministic=True is not possible with sampler=vllm, which computes in an order of its own; "
            "use --sampler local"
        )


def _contradict_turns(config: Config) -> Iterator[str]:
    turns = f"vllm_turn_s={config.vllm.vllm_turn_s:g}"
    if not config.training.trains:
        yield f"{turns} has no effect with train=none, where vLLM servers never wait for a trainer; leave it out"
    if config.vllm.vllm_urls:
        yield f"{turns} is possible only with vLLM servers that Tinsmith starts; leave it or vllm_urls out"
    if config.vllm.vllm_tensor_parallel > 1:
        several = f"vllm_tensor_parallel={config.vllm.vllm_tensor_parallel}"
        yield (
            f"{turns} puts each vLLM server on the trainer's GPU, and {several} divides it over several; "
            "leave one of them out"
        )
    if config.distributed.workers > 1:
        yield f"{turns} is possible with one worker, not with workers={config.distributed.workers}"


def _contradict_ray(config: Config) -> Iterator[str]:
    ray, device = f"ray_address={config.distributed.ray_address}", config.models.device
    if importlib.util.find_spec("ray") is None:
        yield f"{ray} needs the package ray; install it with: {installer('ray')}"
    if ":" in device:
        yield f"{ray} and device={device} contradict each other: Ray gives each worker its GPU; use --device cuda"
    if config.sampling.sampler == "vllm":
        yield f"{ray} is not possible with sampler=vllm: its servers would use GPUs that Ray has not reserved"
