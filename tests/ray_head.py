"""A Ray of a test's own: a head that listens on the loopback address alone, and hosts beside it with other addresses of
that interface.

`python -m tests.ray_head DIRECTORY CORES GPUS [HEAD HOST]` keeps its files in DIRECTORY, whose path must be short,
writes its address, and ends with its input. It is the head of a cluster, or joins that of HEAD as another host, whose
address is HOST: then Ray listens on all interfaces. Programs that connect need the token that is in the environment.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

# Ray reads these when it is imported.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # as in an engine
# As on these systems, Ray then listens on the loopback address alone
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
from ray.util.placement_group import placement_group

from tests.preloaded import REAL_PYTHON

_MEMORY = 80_000_000
"""Bytes of each host's object store."""


@contextmanager
def ray_head(cores: int, gpus: int = 0) -> Iterator[str]:
    """The address of a Ray with so many cores and GPUs."""
    with _running(str(cores), str(gpus)) as (_, address):
        yield address


@contextmanager
def another_host(head: str, host: str, cores: int) -> Iterator[psutil.Process]:
    """Something like a host of this address that has joined the cluster of `head`: a process, of which all that runs
    there is a child."""
    with _running(str(cores), "0", head, host) as (process, _):
        yield process


@contextmanager
def core_taken(address: str) -> Iterator[None]:
    """Another program has a core of the head's host."""
    ray.init(address=address, log_to_driver=False)
    taken = placement_group([{"CPU": 1, "node:127.0.0.1": 0.001}])
    assert taken.wait(60.0)
    yield
    ray.shutdown()


def own_node() -> str:
    """The host that this process, which is connected to a Ray, runs on."""
    return str(ray.get_runtime_context().get_node_id())


@contextmanager
def _running(*arguments: str) -> Iterator[tuple[psutil.Process, str]]:
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        command = [REAL_PYTHON, "-m", "tests.ray_head", directory, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield psutil.Process(process.pid), process.stdout.readline().strip()
            process.communicate()


def head(directory: str, cores: int, gpus: int) -> None:
    """Run the head of a cluster until the input ends."""
    context: Any = ray.init(
        address="local",
        num_cpus=cores,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=_MEMORY,
        _temp_dir=directory,
        _system_config={"enable_metrics_collection": False, "prestart_worker_first_driver": False},
    )
    print(context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


def join(directory: str, cores: int, head: str, host: str) -> None:
    """Run a host of a cluster until the input ends.

    `ray start` would take the loopback address of the head for that of this host.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters: Any = RayParams(
        gcs_address=head,
        redis_address=head,
        node_ip_address=host,
        num_cpus=cores,
        num_gpus=0,
        object_store_memory=_MEMORY,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        include_log_monitor=None,
        temp_dir=directory,
    )
    node: Any = Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
    print(head, flush=True)
    sys.stdin.read()
    node.kill_all_processes(check_alive=False, allow_graceful=True)


def main() -> None:
    """Run what the arguments say."""
    directory, cores, gpus, *others = sys.argv[1:]
    if others:
        join(directory, int(cores), *others)
    else:
        head(directory, int(cores), int(gpus))


if __name__ == "__main__":
    main()
