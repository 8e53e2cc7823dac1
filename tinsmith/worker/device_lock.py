"""Locks a GPU for one server, unless several agreed to share it.

Each GPU has a file, named by the GPU's UUID, in a directory of the user's. A worker with a `memory_share` below 1 locks
it together with others that have one, any other worker alone. The kernel frees the lock when the process ends.

The GPUs of vLLM servers are locked by the worker that starts these, once for its life: the servers come and go, and may
share the worker's own GPU. Servers of --vllm-url lock nothing.

Not seen are servers of other users, and those in containers that do not share the directory for temporary files.
"""

import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tinsmith.config import Config, base_model_sources
from tinsmith.errors import ConfigError

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""Seconds that a worker waits for the lock: one whose server was killed may still be about to end."""
_RETRY_S = 0.1
_LOCKS = Path("/proc/locks")


class DeviceLock:
    """The lock of one device, held until `close` or the end of the process."""

    def __init__(self, directory: int, file: int) -> None:
        self._descriptors = [directory, file]

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


def lock_devices(config: Config, patience_s: float = PATIENCE_S) -> list[DeviceLock]:
    """Lock all GPUs that a worker and its vLLM servers use. A CPU is not locked.

    Raises ConfigError if one cannot be had within `patience_s`, or if there is no GPU of which `memory_share` could be
    a share.
    """
    import torch  # here, because these take seconds

    from tinsmith.models.base import loading_of, pick_device
    from tinsmith.models.machine import limit_memory

    own = pick_device(loading_of(config).device)
    used = _gpus_of_servers(config)
    if own.type == "cuda":
        torch.cuda.set_device(own)
        used.add(own.index)
    named: dict[str, str] = {}
    for gpu in used:
        properties = torch.cuda.get_device_properties(gpu)
        named[str(properties.uuid)] = f"cuda:{gpu} ({properties.name})"
    if not named:
        limit_memory(torch.device("cpu"), config.models.memory_share)
    held: list[DeviceLock] = []
    with ExitStack() as refused:
        for uuid in sorted(named):  # in one order for all: of two servers that start together, one gets all
            got = lock(uuid, named[uuid], config.models.memory_share < 1, patience_s)
            refused.callback(got.close)
            held.append(got)
        refused.pop_all()
    return held


def _gpus_of_servers(config: Config) -> set[int]:
    """GPUs of all vLLM servers that a worker with this configuration starts."""
    if config.sampling.sampler != "vllm" or config.vllm.vllm_urls:
        return set()
    import torch

    from tinsmith.models.base import pick_device
    from tinsmith.sampling.vllm.launch import gpus_of  # needs packages that are not there without vLLM

    device, seen = pick_device(config.models.device), torch.cuda.device_count()
    return {
        gpu for name in base_model_sources(config) for server in gpus_of(name, config, device, seen) for gpu in server
    }


def lock(uuid: str, name: str, shared: bool, patience_s: float = PATIENCE_S) -> DeviceLock:
    """Lock the device with that UUID, which errors call `name`; `shared` locks do not exclude each other.

    Raises ConfigError if it cannot be had within `patience_s`.
    """
    if not re.fullmatch(r"[\w-]+", uuid):
        raise ConfigError(f"{name} has the UUID {uuid!r}, which can name no file")
    directory = _directory()
    file = os.open(f"{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=directory)
    wanted = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + patience_s
    told = False
    while not _locked(file, wanted):
        if time.monotonic() >= deadline:
            holders = _holders(file)
            os.close(file)
            os.close(directory)
            raise ConfigError(
                f"{name} is used by another server{holders}; start both with --memory-share, such as --memory-share "
                "0.5, or give each a GPU of its own (--device, CUDA_VISIBLE_DEVICES)"
            )
        if not told:
            log.info("waiting up to %.0f s for another server to leave %s", patience_s, name)
            told = True
        time.sleep(_RETRY_S)
    return DeviceLock(directory, file)


def _locked(file: int, wanted: int) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(file, wanted | fcntl.LOCK_NB)
        return True
    return False


def _directory() -> int:
    """Open this user's directory for locks, made if missing, which nobody else can write to.

    It is locked too, which keeps services that tidy up temporary files away from it. Raises ConfigError if it is not
    ours alone.
    """
    path = Path(tempfile.gettempdir()) / f"tinsmith-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(
            f"{path}, which holds the locks of GPUs, cannot be used as a directory: {error.strerror}; remove it"
        ) from error
    found = os.fstat(directory)
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        os.close(directory)
        raise ConfigError(
            f"{path}, which holds the locks of GPUs, must be this user's (it belongs to user {found.st_uid}) and "
            f"closed to others (its mode is {stat.S_IMODE(found.st_mode):o}); "
            "remove it, or name another place for temporary files with TMPDIR"
        )
    fcntl.flock(directory, fcntl.LOCK_SH)
    return directory


def _holders(file: int) -> str:
    """Name the holders of a file's lock, as part of a sentence; empty if the system does not tell."""
    if not _LOCKS.is_file():
        return ""
    inode = os.fstat(file).st_ino
    processes = set()
    for line in _LOCKS.read_text().splitlines():  # "1: FLOCK  ADVISORY  WRITE 4711 fd:01:1234567 0 EOF"
        found = re.fullmatch(rf"\d+: FLOCK\s+\w+\s+\w+\s+(\d+) \w+:\w+:{inode} .*", line)
        if found and psutil.pid_exists(int(found[1])):
            processes.add(int(found[1]))
    return f" ({', '.join(f'process {pid}' for pid in sorted(processes))})" if processes else ""
