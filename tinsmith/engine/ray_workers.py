"""Runs workers as actors of Ray, each with the GPU (or core) that Ray reserves for it, on one host or several.

The engine is a client of a Ray that runs already. It reserves what all workers need in one placement group, for as long
as it lives, and starts every worker in an actor of its own (`ray_actor.py`), which ends with the engine. A thread for
each worker waits for Ray, and passes on what the worker writes.

Ray takes more than a minute to find out that a host has vanished. The engine does not wait for that before it ends the
other workers, but before it starts new ones: a place that is reserved may not be there.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import tinsmith
from tinsmith.config import Config
from tinsmith.engine.launching import Launcher, Surroundings, WorkerProgram
from tinsmith.engine.ray_actor import GIVEN_BY_RAY, PARENT, WorkerActor
from tinsmith.errors import ConfigError
from tinsmith.protocol.child_process import Start

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Seconds that Ray may take to accept a connection."""

RESERVE_S = 60.0
"""Seconds that Ray may take to reserve what the workers need: an earlier engine may just be giving it back."""

RESERVE_HERE_S = 10.0
"""Seconds for a reservation on the server's host alone, if other hosts have enough too."""

KILL_S = 5.0
"""Seconds that a killed actor may take to end. After that its host counts as vanished."""

_MARK = ".seen-by-workers-"
"""Prefix of files that show workers which directories they share with the engine."""


class RayActors(Launcher):
    """Starts workers in actors of Ray."""

    gpus_by_number = False

    def __init__(self, config: Config, wake: Callable[[], None]) -> None:
        """Connect to Ray and reserve what the workers need.

        `wake` is called, by any thread, when one of them has ended.

        Raises ConfigError if Ray does not answer or has too little.
        """
        self._wake = wake
        self._programs: list[RayProgram] = []
        self._nodes: list[str] = []
        """Node of Ray on which each worker is to start, by rank, as `hosts` found it last."""
        self._waits = False
        _connect(config.distributed.ray_address)
        with contextlib.ExitStack() as undo:
            undo.callback(ray.shutdown)
            self._reserve(config, config.distributed.workers)
            undo.pop_all()
        self._shared = _mark(config)

    def _reserve(self, config: Config, count: int) -> None:
        self._own_node = ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        self.host: str | None = nodes[self._own_node]["NodeManagerAddress"]
        gpus = sum(_has(node, "GPU") for node in nodes.values())
        self.device = "cuda" if config.models.device != "cpu" and (gpus or config.models.device != "auto") else "cpu"
        """Device of every worker; each sees its own GPU only."""
        kind = "GPU" if self.device == "cuda" else "CPU"
        here, there = _has(nodes[self._own_node], kind), sum(_has(node, kind) for node in nodes.values())
        if count > there:
            raise ConfigError(
                f"--workers {count}: Ray has {there} {kind}s, {here} of them on this host ({self.host}), "
                "and each worker needs its own; "
                f"ask for fewer, or start Ray with --num-{kind.lower()}s, here or on other hosts"
            )
        self._needs: dict[str, float] = {"num_gpus": 1, "num_cpus": 0} if kind == "GPU" else {"num_cpus": 1}
        # A resource of which every host has one, by which Ray's programs ask for it
        on_this_host = {f"node:{self.host}": 0.001}
        elsewhere = there > here
        reserved = count <= here and self._get(
            {kind: 1} | on_this_host, count, RESERVE_HERE_S if elsewhere else RESERVE_S
        )
        if not reserved and not (elsewhere and self._get({kind: 1}, count, RESERVE_S)):
            raise ConfigError(
                f"--workers {count}: other programs use Ray's {there} {kind}s, {here} of them on this host "
                f"({self.host}); end them, or ask for fewer"
            )
        hosts = Counter(self.hosts() or [self.host] * count)
        log.info(
            "Ray has reserved %ss for the workers: %s",
            kind,
            ", ".join(f"{number} on {host}" for host, number in hosts.items()),
        )

    def _get(self, bundle: dict[str, float], count: int, patience_s: float) -> bool:
        """Reserve so many bundles, on as few hosts as possible. False if others have them."""
        self._reserved = placement_group([bundle] * count, strategy="PACK")
        if self._reserved.wait(patience_s):
            return True
        remove_placement_group(self._reserved)
        return False

    def hosts(self) -> list[str] | None:
        """Address of each worker's host, by rank; empty if that is the server's for all.

        None if a host has vanished, and neither Ray knows it yet nor another has room.
        """
        self._programs = [program for program in self._programs if not program.has_ended]
        places = placement_group_table(self._reserved)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        self._nodes = [places[rank] for rank in sorted(places)]
        missing = [rank for rank, node in enumerate(self._nodes) if node not in addresses]
        if missing and not self._waits:
            log.warning("%d workers wait for Ray: their host is gone, and no other has room for them", len(missing))
        self._waits = bool(missing)
        if missing or self._programs:
            return None
        return [addresses[node] for node in self._nodes] if {*self._nodes} != {self._own_node} else []

    def launch(self, surroundings: Surroundings, start: Start) -> "RayProgram":
        """Start a program in a new actor, where `hosts` has said last."""
        place = PlacementGroupSchedulingStrategy(self._reserved, start.place.rank)
        actor: Any = (
            ray.remote(WorkerActor)
            .options(scheduling_strategy=place, max_restarts=0, max_task_retries=0, **self._needs)
            .remote()
        )
        left = {
            name: value
            for name, value in os.environ.items()
            if name not in GIVEN_BY_RAY and not name.startswith("RAY_")
        }
        said = actor.run.remote(
            surroundings.command(PARENT),
            start.to_bytes(),
            left | dict(surroundings.variables),
            os.getcwd(),  # noqa: PTH109
            self._nodes[start.place.rank],
            {name: str(file) for name, file in self._shared.items()},
        )
        self._programs.append(RayProgram(actor, said, self._wake))
        return self._programs[-1]

    def stand_by(self, surroundings: Surroundings, are_ready: bool) -> None:
        """Nothing stands by in Ray: a worker that has ended may start on another host."""

    def close(self) -> None:
        """Leave Ray, which ends what is left of the actors and gives back what was reserved."""
        ray.shutdown()
        for file in self._shared.values():
            file.unlink(missing_ok=True)


class RayProgram(WorkerProgram):
    """A program that runs in an actor."""

    kill_s = KILL_S

    def __init__(self, actor: Any, said: Any, wake: Callable[[], None]) -> None:
        """`said` is what the actor's `run` yields."""
        self._actor = actor
        self._said = said
        self._wake = wake
        self._code = -int(signal.SIGKILL)
        self.has_ended = False
        threading.Thread(target=self._follow, name="actor", daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        return self._code if self.has_ended else None

    def end(self) -> None:
        ray.kill(self._actor)

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
            self.has_ended = True
            self._wake()


def _connect(address: str) -> None:
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except OSError as error:
            raise ConfigError(
                f"--ray-address {address}: nobody answers there ({error}); start Ray with: ray start --head"
            ) from error
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        # Ray lets actors import first what lies in the working directory
        with contextlib.chdir(Path(tinsmith.__file__).parent.parent):
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"--ray-address {address}: {reason}; Ray must run on this host too (ray start), in version "
            f"{ray.__version__}, and with the same token, if it asks for one"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray has one of its own, and the server says when the engine ends


def _has(node: dict[str, Any], kind: str) -> int:
    return int(node["Resources"].get(kind, 0))


def _mark(config: Config) -> dict[str, Path]:
    """Write a new file to each directory that all workers must see, to check it; returns them by setting name."""
    shared = {"data_dir": config.data_dir}
    if config.checkpoint_root and "://" not in config.checkpoint_root and config.training.trains:
        shared["checkpoint_root"] = config.checkpoint_root
    for old in Path(config.data_dir).glob(f"{_MARK}*"):  # of an engine that was killed
        old.unlink(missing_ok=True)
    files = {name: Path(home).expanduser().absolute() / f"{_MARK}{uuid.uuid4().hex}" for name, home in shared.items()}
    for file in files.values():
        file.touch()
    return files


def _write(text: bytes) -> None:
    sys.stderr.buffer.write(text)
    sys.stderr.buffer.flush()
