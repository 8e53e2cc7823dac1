"""Starts a worker's program as a child process of the engine. `ray_workers.py` does so in Ray, with the same interface."""

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinsmith.config import Config
from tinsmith.protocol.child_process import start_bytes
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.place import Place

log = logging.getLogger(__name__)

KILL_S = 30.0
"""Seconds that a killed process may take to end: giving back a GPU and hundreds of gigabytes takes some."""


@dataclass(frozen=True)
class WorkerStart:
    """Arguments for the start of a worker."""

    program: Sequence[str]
    place: Place
    address: str
    """Address of the engine's end of its link."""
    keys: ChildKeys | None
    config: Config
    variables: Mapping[str, str]
    """Environment variables beside those of the engine."""

    def command(self, parent_pid: str) -> list[str]:
        """The program and its arguments, to be started by the process `parent_pid`."""
        return [*self.program, self.address, parent_pid, str(self.place.rank), str(self.place.count), self.place.meeting]

    @property
    def standard_input(self) -> bytes:
        return start_bytes(self.config, self.keys)


class WorkerProgram(Protocol):
    """The program of a worker, wherever it runs. `subprocess.Popen` is one, but for `fault`."""

    fault: str
    """Why it has ended, if its exit code does not say that."""

    @property
    def pid(self) -> int | None:
        """Id of its process, once that is known."""
        ...

    def poll(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        ...

    def kill(self) -> None:
        """End it at once. If nothing can end it, it is taken to have ended after a time."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return as `poll`. Raises subprocess.TimeoutExpired."""
        ...


class Launcher(Protocol):
    """Starts the programs of workers."""

    host: str | None
    """Address of this host at which workers find the engine; None for workers that are its own children."""
    gpus_by_number: bool
    """Whether a worker sees the GPUs of others too, so that it is told the number of its own."""

    def hosts(self) -> Sequence[str] | None:
        """Address of each worker's host, by rank; empty if all start on this one. None if that is not decided: ask again later."""
        ...

    def launch(self, launch: WorkerStart) -> WorkerProgram:
        """Start a program; returns without waiting for it."""
        ...

    def close(self) -> None:
        """End the launcher: nothing is started any more."""
        ...


class ChildProcess(subprocess.Popen[bytes]):
    """A program that this process has started.

    One that is killed and does not end is held by the kernel, perhaps for a driver or a disk. It is taken to have ended: nobody waits
    for ever.
    """

    fault = ""
    _given_up_at = math.inf
    """Monotonic time at which it is taken to have ended though it has not."""
    _was_given_up = False

    def kill(self) -> None:
        self._given_up_at = min(self._given_up_at, time.monotonic() + KILL_S)
        super().kill()

    def poll(self) -> int | None:
        code = super().poll()
        return self._give_up() if code is None and time.monotonic() >= self._given_up_at else code

    def wait(self, timeout: float | None = None) -> int:
        left_s = max(0.0, self._given_up_at - time.monotonic())
        if left_s > (math.inf if timeout is None else timeout) or left_s == math.inf:
            return super().wait(timeout)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return super().wait(left_s)
        return self._give_up()

    def _give_up(self) -> int:
        if not self._was_given_up:
            log.error(
                "process %d does not end %.0f s after it was killed, because the kernel holds it: it is left behind, with what it has of "
                "GPUs and memory",
                self.pid,
                KILL_S,
            )
        self._was_given_up = True
        return -int(signal.SIGKILL)


class ChildProcesses:
    """Starts workers as child processes."""

    host: str | None = None
    gpus_by_number = True

    def hosts(self) -> Sequence[str] | None:
        return ()

    def launch(self, launch: WorkerStart) -> ChildProcess:
        process = ChildProcess(launch.command(str(os.getpid())), stdin=subprocess.PIPE, env=os.environ | dict(launch.variables))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `poll` tells
            process.stdin.write(launch.standard_input)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        return process

    def close(self) -> None:
        """Do nothing."""
