"""Loads a worker's base models, checks their numbers before they are served, and makes what trains and samples them."""

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import transformers

from tinsmith import __version__
from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError
from tinsmith.kernels.compiled import digest_of_sources
from tinsmith.memory.budget import GIB, computes_together
from tinsmith.memory.sizing import require_sampler, size_of
from tinsmith.models.base import BaseModel, load_base_model, loading_of, loading_to_compare, pick_device
from tinsmith.models.families import is_packed
from tinsmith.models.files import local_directory
from tinsmith.models.fingerprint import state_of_files
from tinsmith.models.layout import read_layout
from tinsmith.models.machine import free_memory, limit_memory, size_text
from tinsmith.models.mxfp4 import METHOD
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.expert_cost import ExpertCost, measure_cost
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.self_check import check_base_model
from tinsmith.training.backend import LocalBackend
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sequence_parallel import SHORTEST_SLICE
from tinsmith.training.parallel.sharded_backend import ShardedBackend
from tinsmith.training.parallel.sharded_layers import require_divisible, shard
from tinsmith.worker.admission import SamplingBase
from tinsmith.worker.device_memory import DeviceMemory
from tinsmith.worker.device_turns import Sleeper
from tinsmith.worker.passes import TrainingBase

log = logging.getLogger(__name__)

PASSED_DIR = "self_checks"
"""Subdirectory of the data directory with a file for each self-check that was passed in full."""
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
"""Packages whose versions may change what a base model computes, or what we compute with it."""
VARIABLES = ("ATEN_", "CUBLAS", "CUDNN", "NVIDIA_TF32", "PYTORCH_", "TORCH_", "TRITON_")
"""Prefixes of environment variables that may do the same."""
WHOLE_BASE = 1.1
"""Device memory that a base model takes while it lies there whole, to be sharded, as a multiple of its size."""


def stays_on_host(source: str, config: Config) -> bool:
    """Whether layers that are to be sharded wait in the host's memory, because the device has no room for all of them.

    On a GPU that has room, the self-check takes seconds in place of minutes. On a CPU several workers share pages.
    """
    if not config.shards_weights:
        return False
    device = pick_device(config.models.device)
    if device.type == "cpu":
        return True
    limit_memory(device, config.models.memory_share)
    return free_memory(device) < WHOLE_BASE * size_of(source, config.models).weight_bytes + GIB


def load_bases(
    config: Config, begin: Callable[[], None] = lambda: None, measures: bool = True, again: bool = False
) -> dict[str, BaseModel]:
    """Load every base model of the configuration and check it; `begin` is called before each load and each check.

    With `measures` the log says what quantized experts cost: one worker's word is enough. With `again` they take the
    place of what another worker has just had: models that have passed their full check are not checked.

    Raises ConfigError as `load_base_model` and `check_base_model` do.
    """
    features = config.images.image_cache_mib * 2**19  # the other half is for pixel values
    loading = loading_of(config)
    if config.only_compares:
        log.info(
            "base models go into the host's memory: nothing is trained, and what vLLM servers "
            "compute is compared with them"
        )
    for name, source in base_model_sources(config).items():
        if config.sampling.sampler == "vllm":
            require_sampler(name, read_layout(source), config)
    bases: dict[str, BaseModel] = {}
    files, on_host = dict[str, str](), dict[str, bool]()
    for name, source in base_model_sources(config).items():
        begin()
        started = time.monotonic()
        log.info("loading %s from %s ...", name, source)
        # Files that change now are not what has passed
        files[name], on_host[name] = _state_of(source), stays_on_host(source, config)
        base = bases[name] = load_base_model(name, source, loading, features, on_host[name])
        files[name] = files[name] or _state_of(source)  # they may have been downloaded just now
        if config.shards_weights:
            require_divisible(base)
        log.info(
            "loaded %s (%s) on %s in %s, %.1f s",
            name,
            base.family.model_type,
            base.device,
            base.dtype,
            time.monotonic() - started,
        )
    for name, base in bases.items():
        begin()
        passed = _check(base, config, files[name], config.sampling.sampler == "local", on_host[name], again)
        if base.expert_format is not None and base.expert_format.name == METHOD and is_packed(base.config):
            log.info("%s: its experts are held as its files have them", name)
        elif measures and base.expert_format is not None:
            cost = _cost_of(base, passed.with_suffix(".cost"), remembers=bool(files[name]))
            log.info("%s: its experts are held in %s, which costs %s", name, base.expert_format.name, cost)
    return bases


def _cost_of(base: BaseModel, file: Path, remembers: bool) -> ExpertCost:
    """What quantized experts cost: read from the file, or measured and written there."""
    with suppress(OSError, ValueError, TypeError):  # it is not there, or damaged
        return ExpertCost(**json.loads(file.read_text()))
    cost = measure_cost(base)
    if remembers:
        _remember(file, json.dumps(asdict(cost)), "measures the cost of its experts again")
    return cost


def load_compared(config: Config, bases: Mapping[str, BaseModel]) -> dict[str, BaseModel]:
    """Load whole copies of base models that are about to be sharded into the host's memory; none where they stay whole.

    vLLM servers are compared with them, and adapters are merged into them. Their layers are mapped pages of their
    files, if these are in the precision that is served. Raises ConfigError if the host has no room for them.
    """
    compared: dict[str, BaseModel] = {}
    if not config.compares_with_copy:
        return compared
    loading, sources = loading_to_compare(config), base_model_sources(config)
    size = sum(size_of(source, loading).weight_bytes for source in sources.values())
    free = free_memory(torch.device("cpu"))
    if size > free:  # mapped pages too are read again for each canary if they do not stay in memory
        raise ConfigError(
            f"--shard weights and --sampler vllm: the copies of {', '.join(sources)} with which vLLM servers are "
            f"compared need {size_text(size)} of the host's memory, of which {size_text(free)} are free; "
            "free some, or use --sampler none"
        )
    for name, source in sources.items():
        started = time.monotonic()
        files = _state_of(source)
        base = compared[name] = load_base_model(
            name, source, loading, config.images.image_cache_mib * 2**19, layers_on_host=True
        )
        base.computed_fingerprint = bases[name].computed_fingerprint
        log.info(
            "loaded %s once more into the host's memory, to compare vLLM servers with it, %.1f s",
            name,
            time.monotonic() - started,
        )
        _check(base, config, files, samples=False, on_host=True)
    return compared


def _check(base: BaseModel, config: Config, files: str, samples: bool, on_host: bool, again: bool = False) -> Path:
    """Check a base model, quickly if the full check passed before in the same surroundings, and not at all `again`.

    Returns the file in which that is remembered.
    """
    started = time.monotonic()
    known = _surroundings(base, files, samples, on_host)
    passed = Path(config.data_dir) / PASSED_DIR / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"
    why = "--self-check full" if config.models.self_check == "full" else _why_full(passed, known)
    if again and not why:
        log.info("%s is not checked again: a worker has just ended that passed with the same", base.name)
        return passed
    form = "full" if why else "quick"
    log.info(
        "%s: the %s self-check runs: %s",
        base.name,
        form,
        why or "the full one was passed with these files, versions and settings",
    )
    try:
        check_base_model(base, samples=samples, quick=not why)
    except ConfigError:
        with suppress(OSError):
            passed.unlink()
        raise
    log.info(
        "%s passes its self-check on %s, %.1f s, in its %s form",
        base.name,
        base.device,
        time.monotonic() - started,
        form,
    )
    if why and files:
        _remember(passed, known, "checks in full again")
    return passed


def _why_full(passed: Path, known: str) -> str:
    """Return why the quick form does not suffice, empty if it does."""
    try:
        return "" if passed.read_text() == known else f"{passed} is damaged"
    except FileNotFoundError:
        return "none was passed yet with these files, versions and settings"
    except (OSError, UnicodeDecodeError) as error:
        return f"{passed} cannot be read: {error}"


def _remember(file: Path, text: str, without: str) -> None:
    """Note something for the next start; `without` says what that does if the file cannot be written."""
    new = file.with_suffix(f"{file.suffix}.{os.getpid()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text)
        new.replace(file)
    except OSError as error:
        log.warning("the next start %s, as %s cannot be written: %s", without, file, error)


def _state_of(source: str) -> str:
    """`state_of_files` of a model; empty if unknown, which is never remembered."""
    directory = local_directory(source)
    with suppress(OSError):
        return state_of_files(directory) if directory is not None else ""
    return ""


def _surroundings(base: BaseModel, files: str, samples: bool, on_host: bool) -> str:
    """All that the numbers of a self-check depend on, as JSON."""
    device = (
        torch.cuda.get_device_name(base.device)
        if base.device.type == "cuda"
        else torch.backends.cpu.get_cpu_capability()
    )
    facts = {
        "files": files,
        "code": digest_of_sources(),
        "versions": versions() | {"cuda": torch.version.cuda},
        "device": f"{base.device.type} {device}",
        "dtype": str(base.dtype),
        "experts": base.expert_format.name if base.expert_format else None,
        "deterministic": base.deterministic,
        "layers in host memory": on_host,
        "samples": samples,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
    }
    return json.dumps(facts, indent=1, sort_keys=True)


@cache
def versions() -> dict[str, str | None]:
    """The versions of the packages that compute, as they were when this was first asked."""
    return {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def require_same(group: ProcessGroup, bases: Mapping[str, BaseModel]) -> None:
    """Raise ConfigError on all workers of several hosts, naming what differs, if programs or base models do.

    Replicas of different weights would train something that no single worker has. To be called by all.
    """
    hosts = group.texts(group.place.host)
    versions = {
        "Tinsmith": __version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "transformers": transformers.__version__,
    }
    here = versions | {f"the weights of {name}": base.fingerprint for name, base in bases.items()}
    for what, own in here.items():
        found = group.texts(own)
        if len(set(found)) > 1:
            told = ", ".join(f"{each} on {host}" for host, each in dict(zip(hosts, found, strict=True)).items())
            raise ConfigError(
                f"workers on several hosts need the same of all that computes, but {what} differs: {told}; "
                "install the same"
            )


# What a worker trains and samples its base models with, as it is configured.


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
    sampling = config.sampling if config.training.trains else replace(config.sampling, recorded_routes_gib=0.0)
    for name, base in bases.items():
        sampler = LocalSampler(base, sampling, config.training.logits_chunk, memory.cache_sizes(name))
        log.info(
            "%s: the cache of %s (--kv-cache-gib) holds %s",
            name,
            size_text(memory.plans[name].budget.cache),
            sampler.capacity(),
        )
        sampled[name] = SamplingBase(sampler, renderers[name])
    return sampled


def vllm_samplers(
    bases: Mapping[str, BaseModel], renderers: Mapping[str, Renderer], config: Config, wake: Callable[[], None]
) -> tuple[dict[str, SamplingBase], list[Sleeper]]:
    """Start vLLM servers on copies of the weights; return samplers, also as sleepers that alternate with training."""
    from tinsmith.sampling.vllm.sampler import start_vllm_sampler  # needs packages that are not there without vLLM

    started = {name: start_vllm_sampler(base, renderers[name], config, wake) for name, base in bases.items()}
    return {name: SamplingBase(sampler, renderers[name]) for name, sampler in started.items()}, list(started.values())
