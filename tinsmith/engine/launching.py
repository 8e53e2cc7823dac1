"""Starts the programs of workers, and ends them."""

import contextlib
import logging
import math
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinsmith.protocol.child_process import Start

log = logging.getLogger(__name__)

KILL_S = 30.0
"""Seconds that a killed process may take to end: giving back a GPU and hundreds of gigabytes takes some."""


_LOOK_S = 0.02
"""Seconds between two looks whether a program has ended that is waited for."""


@dataclass(frozen=True)
class Surroundings:
    """The program of a worker and its environment."""

    program: Sequence[str]
    variables: Mapping[str, str]

    def command(self, parent_pid: str) -> list[str]:
        """The program and its argument, to be started by the process `parent_pid`."""
        return [*self.program, parent_pid]


class WorkerProgram(ABC):
    """The program of a worker, wherever it runs.

    One that is killed and does not end is held by the kernel, perhaps for a driver or a disk, or its host is gone. It
    computes nothing any more, and is taken to have ended after a time: nobody waits for ever.
    """

    fault = ""
    """Why it has ended, if its exit code does not say that."""
    pid: int | None = None
    """Id of its process, once that is known."""
    kill_s = KILL_S
    """Seconds that it may take to end when it is killed."""
    _given_up_at = math.inf
    _was_given_up = False

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""

    @abstractmethod
    def end(self) -> None:
        """Let it be ended at once."""

    def kill(self) -> None:
        """End it at once; its time to end begins."""
        self._given_up_at = min(self._given_up_at, time.monotonic() + self.kill_s)
        self.end()

    def poll(self) -> int | None:
        """Return its exit code, or one of a program that is killed if it is given up; None while it runs."""
        code = self.exit_code
        if code is not None or time.monotonic() < self._given_up_at:
            return code
        if not self._was_given_up:
            self._was_given_up = True
            log.error(
                "process %s does not end %.0f s after it was killed, because the kernel holds it or its host is gone: "
                "it is left behind, with what it has of GPUs and memory",
                *(self.pid, self.kill_s),
            )
        return -int(signal.SIGKILL)

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Wait for its end and return as `poll`."""
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return code


class ChildProgram(WorkerProgram):
    """A program that this process has started, and which imports its libraries until it is told what to do."""

    def __init__(self, surroundings: Surroundings) -> None:
        self.kill_s = KILL_S
        command, environment = surroundings.command(str(os.getpid())), os.environ | dict(surroundings.variables)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self.surroundings = surroundings
        self.pid = self._process.pid

    def tell(self, start: Start) -> None:
        """Let it begin, once."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which `poll` tells
            self._process.stdin.write(start.to_bytes())
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        self._process.kill()


class Launcher:
    """Starts the programs of workers, here as children of this process; `ray_workers.py` does so in Ray.

    Some may stand by: when a worker has ended, the next need not import its libraries.
    """

    def __init__(self) -> None:
        self._standing_by: list[ChildProgram] = []

    host: str | None = None
    """Address of this host at which workers find the engine; None for workers that are its own children."""
    gpus_by_number = True
    """Whether a worker sees the GPUs of others too, so that it is told the number of its own."""

    def hosts(self) -> Sequence[str] | None:
        """Address of each worker's host, by rank; empty if all start on this one.

        None if that is not decided: ask again later.
        """
        return ()

    def launch(self, surroundings: Surroundings, start: Start) -> WorkerProgram:
        """Start a program, or let one that stands by begin; returns without waiting for it."""
        program = self._take(surroundings) or ChildProgram(surroundings)
        program.tell(start)
        return program

    def stand_by(self, wanted: Sequence[Surroundings]) -> None:
        """Let these programs stand by, for those that are to start next."""
        self._standing_by += [ChildProgram(surroundings) for surroundings in wanted]

    def _take(self, surroundings: Surroundings) -> ChildProgram | None:
        """Return a program that stands by in these surroundings, if one does."""
        ended = [program for program in self._standing_by if program.poll() is not None]
        found = [program for program in self._standing_by if program.surroundings == surroundings]
        taken = next((program for program in found if program not in ended), None)
        self._standing_by = [program for program in self._standing_by if program not in [*ended, taken]]
        return taken

    def close(self) -> None:
        """Start nothing any more, and end what stands by."""
        for program in self._standing_by:
            program.kill()
            program.wait()
        self._standing_by = []
