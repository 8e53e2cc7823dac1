"""The resources of this machine: processors, memory, CUDA devices, and supported versions of libraries.

The engine, which has no torch, runs `python -m tinsmith.models.machine`, which prints how many GPUs PyTorch can use:
what CUDA starts in a process is not to be there when that starts others.
"""

import os
import resource
from dataclasses import dataclass
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import psutil
import torch

from tinsmith.errors import ConfigError, UserError

SUPPORTED = {"torch": ((2, 11), (2, 14)), "transformers": ((5, 17), (5, 25))}
"""First version of each library that the code runs on, and the first that it was not tried on, as in pyproject.toml."""
INSTALLED = {library: version(library) for library in SUPPORTED}
"""Versions of the libraries here. transformers is not imported: that takes a second or two."""
VARLEN_CAPABILITY = (8, 0)
"""Oldest CUDA capability (Ampere) whose variable-length attention kernel PyTorch has in bfloat16."""


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    index: int
    name: str
    total: int
    """Memory in bytes."""
    free: int
    """Memory in bytes that no process holds."""
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """Processors, memory in bytes, and CUDA devices."""

    cpus: int
    memory_total: int
    memory_available: int
    gpus: list[Gpu]
    no_gpu_because: str
    """The reason why PyTorch has no CUDA device; empty if it has one."""


def look_around() -> Machine:
    """Return the resources that this process may use."""
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total, available = _memory()
    return Machine(cpus, total, available, gpus, "" if gpus else why_no_gpu())


def usable_gpus() -> int:
    """Count the GPUs that this PyTorch can use: none if it is built without CUDA, or for a newer driver.

    PyTorch counts what the driver lists. CUDA may show fewer, of cards that are divided for example.
    """
    if not torch.cuda.is_available():
        return 0
    return len(list(takewhile(_is_shown, range(torch.cuda.device_count()))))


def _is_shown(number: int) -> bool:
    try:
        torch.cuda.get_device_properties(number)
    except (RuntimeError, AssertionError):
        return False
    return True


def is_supported(library: str) -> bool:
    """Whether the installed version of a library is in `SUPPORTED`."""
    first, beyond = SUPPORTED[library]
    major, minor = INSTALLED[library].split(".")[:2]
    return first <= (int(major), int(minor)) < beyond


def require_memory(purpose: str, needed: int, device: torch.device, promised: int = 0) -> None:
    """Raise UserError unless a device has `needed` bytes beside `promised` ones that are not taken yet."""
    free = free_memory(device) - promised
    if needed > free:
        raise UserError(
            f"{purpose} needs {needed / 2**30:.4g} GiB of memory on {device}, of which {max(free, 0) / 2**30:.4g} GiB "
            "are free; "
            "end other models, train with LoRA (lora_config.rank of 1 or more), or serve the model on a larger machine"
        )


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still have on a device."""
    if device.type == "cpu":
        return _memory()[1]
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    ours = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device), ours) - allocated


def give_back_pinned_memory() -> None:
    """Let others have the pinned host memory that PyTorch keeps for tensors to come.

    Waits for GPUs, which may still read it.
    """
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch._C._host_emptyCache()  # PyTorch has no public name for it


def give_back_memory(device: torch.device) -> None:
    """Let other processes have the memory of a GPU that PyTorch keeps for tensors to come. Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def limit_memory(device: torch.device, share: float) -> None:
    """Let this process take at most that share of a GPU's memory. Raises ConfigError on a CPU."""
    if share == 1:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"memory_share={share:g} limits the memory of a GPU, and the models run on {device}; leave it out"
        )
    torch.cuda.set_per_process_memory_fraction(share, device)


def memory_held() -> dict[str, int]:
    """Bytes that this process holds: in memory, and on each CUDA device that it uses."""
    resident = psutil.Process().memory_info().rss
    devices = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    on_devices = {f"cuda:{index}": torch.cuda.memory_reserved(index) for index in devices}
    return {"resident": resident, **{device: size for device, size in on_devices.items() if size}}


def size_text(size: int) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def _gpu(index: int) -> Gpu:
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(index, torch.cuda.get_device_name(index), total, free, torch.cuda.get_device_capability(index))


def why_no_gpu() -> str:
    """Return the reason why PyTorch has no CUDA device here."""
    if torch.version.cuda is None:
        return f"torch {INSTALLED['torch']} is built without CUDA"
    return f"torch is built for CUDA {torch.version.cuda}, but finds no device: is there one, and does its driver run?"


def _memory() -> tuple[int, int]:
    """Bytes in all and available: the machine's, or what a container or `ulimit -v` leaves of them."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available  # available counts what the page cache would give back
    # Of Linux
    limit, used, parts = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current", "memory.stat"))
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        total = min(total, int(limit.read_text()))
        cached = dict(line.split() for line in parts.read_text().splitlines()).get("inactive_file", "0")
        available = min(available, total - int(used.read_text()) + int(cached))
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        available = min(available, addresses - psutil.Process().memory_info().vms)
    return total, available


if __name__ == "__main__":
    print(usable_gpus())
