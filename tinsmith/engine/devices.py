"""How many workers an engine starts. The engine has no torch to ask, so it counts the devices that the system shows."""

import os
import re
from itertools import takewhile
from pathlib import Path

from tinsmith.config import Config
from tinsmith.errors import ConfigError

_DEVICES = Path("/dev")
_GPU = re.compile(r"\s*(\d+|(GPU|MIG)-.+)\s*")
"""A GPU in CUDA_VISIBLE_DEVICES: its number or its UUID."""


def worker_count(config: Config) -> int:
    """One for each GPU that the workers may use, or as many as are configured. Raises ConfigError for more workers than GPUs."""
    asked, device = config.distributed.workers, config.models.device
    if device == "cpu":
        return asked or 1
    if ":" in device:
        if asked > 1:
            raise ConfigError(f"--workers {asked} and --device {device} contradict each other: each worker has its own GPU; leave one out")
        return 1
    gpus = visible_gpus()
    if gpus == 0 and device == "auto":
        return asked or 1
    if asked > max(1, gpus):
        raise ConfigError(f"--workers {asked}: there are {gpus} GPUs, and each worker needs its own; ask for {max(1, gpus)} or fewer")
    if asked:
        return asked
    # vLLM servers take the GPUs that no worker has.
    return 1 if config.sampling.sampler == "vllm" else max(1, gpus)


def threads_of(config: Config, count: int) -> dict[str, str]:
    """Variables that give each of several workers on a CPU its share of the cores, unless OMP_NUM_THREADS is set."""
    on_cpu = config.models.device == "cpu" or not visible_gpus()
    if count == 1 or not on_cpu or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}


def visible_gpus() -> int:
    """How many GPUs this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:  # CUDA shows those before the first that is none
        return len(list(takewhile(_GPU.fullmatch, named.split(","))))
    return len(list(_DEVICES.glob("nvidia[0-9]*")))
