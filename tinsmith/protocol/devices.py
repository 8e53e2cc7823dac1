"""Chooses how many workers an engine starts, and their devices.

The engine has no torch, so it counts the GPUs that the system shows. Where several would each get a worker, a process
of its own asks PyTorch, which may be able to use fewer.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

from tinsmith.config import Config
from tinsmith.errors import ConfigError

_DEVICES = Path("/dev")
_GPU = re.compile(r"\s*(\d+|(GPU|MIG)-.+)\s*")
"""A GPU in CUDA_VISIBLE_DEVICES: number or UUID."""
COUNTING_S = 120.0
"""Seconds that PyTorch may take to count usable GPUs, with files on a slow disk."""


def require_device(device: str) -> None:
    """Raise ConfigError for a GPU that is asked for and cannot be had. Whether PyTorch can use it is seen later."""
    if not device.startswith("cuda"):
        return
    torch, gpus = version("torch"), visible_gpus()
    remedy = "leave --device out, or use --device cpu"
    if torch.endswith("+cpu"):
        raise ConfigError(f"device={device!r}: torch {torch} is built without CUDA; {remedy}")
    if not gpus and "rocm" not in torch and not (_DEVICES / "dxg").exists():  # as which Windows shows its GPUs to Linux
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "is no GPU on this machine" if named is None else f"is no GPU in CUDA_VISIBLE_DEVICES={named!r}"
        raise ConfigError(f"device={device!r}: there {why}; {remedy}")


def worker_count(config: Config, gpus: int | None = None, usable: int | None = None) -> int:
    """Return the number of workers: as configured, or with --workers 0 the number of GPUs that vLLM servers leave.

    `gpus` is how many there are; None means those of this machine, but Ray says itself which it has. `usable` is how
    many of them PyTorch can use; with None PyTorch is asked if the number of workers depends on it. Raises ConfigError
    if the workers need more GPUs than there are, are to divide what they cannot, or would have nothing to do.
    """
    asked = config.distributed.workers
    _check_ray(config)
    if config.distributed.ray_address:
        gpus = asked
    if gpus is None:
        gpus = visible_gpus()
        if not asked and usable is None and _automatic(config, gpus) > 1:
            usable = usable_gpus()
    count = asked or _automatic(config, gpus if usable is None else min(gpus, usable))
    _check_shard(config, count)
    if count == 1:
        _check_servers(config, count, gpus)
        if config.training.sequence_parallel_from:
            raise ConfigError(
                "sequence_parallel_from has no effect with one worker; add --workers 2 or more, or leave it out"
            )
        return count
    if config.only_compares:
        raise ConfigError(
            f"--workers {count}, --train none and --sampler vllm: one worker compares what vLLM servers compute, "
            "and others would have nothing to do; leave --workers out"
        )
    if config.models.device != "cpu":
        _check_gpus(config, count, gpus)
        _check_servers(config, count, gpus)
    return count


def _check_ray(config: Config) -> None:
    address = config.distributed.ray_address
    if address and not config.distributed.workers:
        raise ConfigError(
            f"--ray-address {address}: say how many workers Ray is to start, with --workers 1 or more; "
            "other programs of its cluster want GPUs too"
        )


def _check_gpus(config: Config, count: int, gpus: int) -> None:
    """Raise ConfigError if several workers have no GPU each.

    Where none is seen they run on the CPU, unless GPUs are asked for.
    """
    device = config.models.device
    if ":" in device:
        raise ConfigError(
            f"--workers {count} and --device {device} contradict each other: each worker has its own GPU; leave one out"
        )
    if gpus == 0 and device == "auto":
        return
    if count > gpus:
        raise ConfigError(
            f"--workers {count}: there are {gpus} GPUs, and each worker needs its own; ask for {max(1, gpus)} or fewer"
        )


def _check_servers(config: Config, count: int, gpus: int) -> None:
    """Raise ConfigError if vLLM servers have too few GPUs beside the workers.

    A single worker may share its GPU with servers of one GPU each, if they have room (`sampling/vllm/launch.py`
    checks).
    """
    if (
        not config.vllm_gpus
        or not gpus
        or config.models.device == "cpu"
        or (count == 1 and config.vllm.vllm_tensor_parallel == 1)
    ):
        return
    workers = 0 if config.only_compares else count
    if workers + config.vllm_gpus > gpus:
        vllm = config.vllm
        raise ConfigError(
            f"--sampler vllm: {workers} workers and {config.vllm_gpus} GPUs of vLLM servers ({vllm.vllm_servers} for "
            f"each of {max(1, len(config.base_models))} base models, on {vllm.vllm_tensor_parallel} each) are "
            f"{workers + config.vllm_gpus} GPUs; there are {gpus}; lower --workers, --vllm-servers or "
            "--vllm-tensor-parallel"
        )


def gpus_needed(config: Config) -> int:
    """Return the number of GPUs of the workers asked for, at least one, and of vLLM servers."""
    return max(1, config.distributed.workers) + config.vllm_gpus


def _automatic(config: Config, gpus: int) -> int:
    """Return a worker for each GPU that vLLM servers leave, and at least one.

    There is one alone where others would have nothing to do, or no GPU of their own: servers of --vllm-url may have any
    of those seen here.
    """
    vllm = config.sampling.sampler == "vllm"
    alone = vllm and (config.only_compares or bool(config.vllm.vllm_turn_s) or bool(config.vllm.vllm_urls))
    if alone or config.models.device == "cpu" or ":" in config.models.device:
        return 1
    return max(1, gpus - config.vllm_gpus)


def _check_shard(config: Config, workers: int) -> None:
    """Raise ConfigError if weights cannot be sharded over so many workers."""
    shard, sampler = config.distributed.shard, config.sampling.sampler
    if shard != "weights":
        return
    if workers == 1:
        raise ConfigError(
            f"--shard {shard} divides weights over several workers; add --workers 2 or more, or leave it out"
        )
    if sampler == "local":
        raise ConfigError(
            f"--shard {shard} and --sampler {sampler}: no worker has all weights to sample from; "
            "add --sampler vllm, or --sampler none and sample the saved checkpoints with another server"
        )
    state = config.training.full_state
    if state != "float32":
        raise ConfigError(
            f"--shard {shard} and --full-state {state}: the state of weights that are sharded is float32; "
            "leave one of them out, or train LoRA, which needs no --full-state"
        )
    if config.models.deterministic:
        raise ConfigError(f"--shard {shard} and --deterministic do not work together; leave one out")


def threads_of(config: Config, count: int) -> dict[str, str]:
    """Return variables that divide the cores among several workers on a CPU, unless OMP_NUM_THREADS is set."""
    on_cpu = config.models.device == "cpu" or (config.models.device == "auto" and not visible_gpus())
    if count == 1 or not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}


def visible_gpus() -> int:
    """Count the GPUs that the system shows to this process."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:  # CUDA shows those before the first that is none
        return len(list(takewhile(_GPU.fullmatch, named.split(","))))
    return len(list(_DEVICES.glob("nvidia[0-9]*")))


def usable_gpus() -> int:
    """Count the GPUs that PyTorch can use. Takes seconds. Raises ConfigError if that fails."""
    command = [sys.executable, "-P", "-m", "tinsmith.models.machine"]
    try:
        ran = subprocess.run(
            command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=COUNTING_S
        )
        return int(ran.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        raise ConfigError(
            "--workers 0 starts a worker on each GPU, and how many of these PyTorch can use was not found out "
            f"({error}); say how many workers start, with --workers 1 or more, or add --device cpu"
        ) from error
