"""Workers in actors of Ray: each gets the GPU, or on a CPU the core, that Ray reserves for it on the server's host.

The engine is a client of a Ray that runs already. It reserves what all workers need in one placement group, for as long as it lives, and
starts every worker in an actor of its own (`ray_actor.py`), which ends with the engine. What a worker writes comes back and goes where
the engine's own output goes. A thread for each worker waits for Ray, so that the engine does not.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tinsmith.config import Config
from tinsmith.engine.launching import WorkerStart
from tinsmith.engine.ray_actor import GIVEN_BY_RAY, PARENT, WorkerActor, identity
from tinsmith.errors import ConfigError

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long Ray may take to accept a connection, in seconds."""

RESERVE_S = 60.0
"""How long Ray may take to reserve what the workers need: what an engine before this one had may just be given back."""


class RayActors:
    """Starts workers in actors of Ray."""

    gpus_by_number = False

    def __init__(self, config: Config, wake: Callable[[], None]) -> None:
        """Connect to Ray and reserve what the workers need. `wake` is called, by any thread, when one of them has ended.

        Raises ConfigError, with the remedy, if Ray does not answer or has too little.
        """
        self._wake = wake
        self._data_dir = os.path.abspath(config.data_dir)  # noqa: PTH100 - as the worker will find it, links included
        self._files = identity(self._data_dir)
        _connect(config.distributed.ray_address)
        try:
            self._reserve(config, config.distributed.workers)
        except ConfigError:
            ray.shutdown()
            raise

    def _reserve(self, config: Config, count: int) -> None:
        node = _own_node()
        self.host: str | None = node["NodeManagerAddress"]
        gpus, cores = (int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU"))
        self.device = "cuda" if config.models.device != "cpu" and (gpus or config.models.device != "auto") else "cpu"
        """Of every worker; each sees its own GPU only."""
        kind, there = ("GPU", gpus) if self.device == "cuda" else ("CPU", cores)
        if count > there:
            raise ConfigError(
                f"--workers {count}: Ray has {there} {kind}s on this host ({self.host}), and each worker needs its own; "
                f"ask for fewer, or start Ray here with --num-{kind.lower()}s {count}"
            )
        self._needs: dict[str, float] = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
        here = f"node:{self.host}"  # a resource of which every host has one, by which Ray's programs ask for it
        self._reserved = placement_group([{kind: 1, here: 0.001} for _ in range(count)], strategy="PACK")
        if not self._reserved.wait(RESERVE_S):
            remove_placement_group(self._reserved)
            raise ConfigError(
                f"--workers {count}: other programs use Ray's {there} {kind}s on this host ({self.host}); end them, or ask for fewer"
            )
        log.info("Ray has reserved %d %ss on %s for the workers", count, kind, self.host)

    def launch(self, launch: WorkerStart) -> "RayProgram":
        """Start a program in a new actor."""
        place = PlacementGroupSchedulingStrategy(self._reserved, launch.place.rank)
        actor: Any = ray.remote(WorkerActor).options(scheduling_strategy=place, max_restarts=0, max_task_retries=0, **self._needs).remote()
        left = {name: value for name, value in os.environ.items() if name not in GIVEN_BY_RAY and not name.startswith("RAY_")}
        said = actor.run.remote(
            launch.command(PARENT),
            launch.standard_input,
            left | dict(launch.variables),
            os.getcwd(),  # noqa: PTH109
            self._data_dir,
            self._files,
        )
        return RayProgram(actor, said, self._wake)

    def close(self) -> None:
        """Leave Ray, which ends what is left of the actors and gives back what was reserved."""
        ray.shutdown()


class RayProgram:
    """A program that runs in an actor."""

    def __init__(self, actor: Any, said: Any, wake: Callable[[], None]) -> None:
        """`said` is what the actor's `run` yields."""
        self.fault = ""
        self.pid: int | None = None
        self._actor = actor
        self._said = said
        self._wake = wake
        self._code = -int(signal.SIGKILL)
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name="actor", daemon=True).start()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._code if self._ended.is_set() else None

    def kill(self) -> None:
        """End the actor, and with it the program."""
        ray.kill(self._actor)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the program in an actor of Ray", timeout or 0.0)
        return self._code

    def _follow(self) -> None:
        """Pass on what the program writes until it has ended, or its actor has."""
        rest = b""
        try:
            for said in self._said:
                match ray.get(said):
                    case ("pid", pid):
                        self.pid = pid
                    case ("output", text):
                        lines, end, rest = (rest + text).rpartition(b"\n")  # those of several workers do not mix
                        _write(lines + end)
                    case ("ended", code):
                        self._code = code
                    case ("refused", why):
                        self.fault = why
            ray.kill(self._actor)
        except ray.exceptions.RayError as error:
            self.fault = f"its Ray actor has ended: {' '.join(str(error).split())}"
        finally:
            _write(rest + b"\n" if rest else b"")
            self._ended.set()
            self._wake()


def _connect(address: str) -> None:
    """Become a client of the Ray at this address."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except OSError as error:
            raise ConfigError(f"--ray-address {address}: nobody answers there ({error}); start Ray with: ray start --head") from error
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--ray-address {address}: {reason}; Ray must run on this host too (ray start), in version {ray.__version__}, "
            "and with the same token, if it asks for one"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has one of its own, and the server says when the engine ends


def _own_node() -> dict[str, Any]:
    """What Ray knows of this host."""
    own = ray.get_runtime_context().get_node_id()
    (node,) = (node for node in ray.nodes() if node["NodeID"] == own)
    return dict(node)


def _write(text: bytes) -> None:
    sys.stderr.buffer.write(text)
    sys.stderr.buffer.flush()
