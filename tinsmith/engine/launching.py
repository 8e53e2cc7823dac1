"""Starts the programs of workers, and ends them."""

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tinsmith.protocol.child_process import Start
from tinsmith.protocol.forking import (
    END,
    READY,
    Request,
    connect,
    digest_of_libraries,
    receive_exit_code,
    receive_worker,
)

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "tinsmith.worker")
"""The program that a worker is."""

FORK_SERVER = (sys.executable, "-P", "-m", "tinsmith.worker.fork_server")
"""The program that forks workers which are ready at once."""

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
    """A program that this process has started, which imports its libraries first."""

    def __init__(self, surroundings: Surroundings, start: Start) -> None:
        self.kill_s = KILL_S
        command, environment = surroundings.command(str(os.getpid())), os.environ | dict(surroundings.variables)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `poll` tells
            self._process.stdin.write(start.to_bytes())
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        self._process.kill()


class ForkedProgram(WorkerProgram):
    """A worker that the fork server has forked: it has its libraries already."""

    def __init__(self, connection: socket.socket, pid: int, process: int) -> None:
        """Watch the process `pid`, of which `process` is a file descriptor, and whose end `connection` tells."""
        self.kill_s = KILL_S
        self.pid = pid
        self._connection = connection
        self._process = process
        self._code: int | None = None

    @property
    def exit_code(self) -> int | None:
        if self._code is None and _has_come(self._process):
            code = receive_exit_code(self._connection)
            self._code = -int(signal.SIGKILL) if code is None else code
            self._connection.close()
            os.close(self._process)
        return self._code

    def end(self) -> None:
        if self._code is None:
            with suppress(ProcessLookupError):  # it has just ended
                signal.pidfd_send_signal(self._process, signal.SIGKILL)


def _has_come(file: int) -> bool:
    """Whether there is something to read; an engine may have more files than `select` takes."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))


class Launcher:
    """Starts the programs of workers, here as children of this process; `ray_workers.py` does so in Ray.

    With a fork server (`tinsmith.worker.fork_server`) workers need not import their libraries when those before have
    ended, nor if this process takes the place of one that has.
    """

    def __init__(self, home: Path | None = None) -> None:
        """Nothing is started yet. `home` is the directory in which a fork server is found; None for none."""
        self._home = home
        self._keeper: socket.socket | None = None
        """Keeps the fork server waiting while it is open."""
        self._fork_server: subprocess.Popen[bytes] | None = None
        """The fork server, if it is a child of this process."""

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
        """Start a program, forked if there is a fork server that has the same libraries."""
        return self._fork(surroundings, start) or ChildProgram(surroundings, start)

    def stand_by(self, surroundings: Surroundings, are_ready: bool) -> None:
        """Start a fork server for these programs, unless one waits already; it is told if they are ready."""
        if self._home is None or surroundings.program != WORKER:
            return
        if not self._is_kept():
            self._start_fork_server(self._home, surroundings)
        if are_ready and self._keeper is not None:
            with suppress(OSError):  # it has just ended
                self._keeper.sendall(READY)

    def _start_fork_server(self, home: Path, surroundings: Surroundings) -> None:
        self._forget()
        self._keeper, theirs = socket.socketpair()
        environment = os.environ | dict(surroundings.variables)
        with theirs:
            command = [*FORK_SERVER, str(home.absolute())]
            self._fork_server = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)

    def _fork(self, surroundings: Surroundings, start: Start) -> WorkerProgram | None:
        """Let the fork server fork a worker; None if there is none, or it has other libraries, or is stopped."""
        if self._home is None or surroundings.program != WORKER:
            return None
        environment = os.environ | dict(surroundings.variables)
        try:
            request = Request(digest_of_libraries(environment), start.to_bytes().decode(), environment, str(Path.cwd()))
        except OSError:  # the working directory is deleted, or files are being replaced
            return None
        connection = connect(self._home, request, (1, 2))
        if connection is None:
            return None
        forked = receive_worker(connection)
        if forked is None:
            connection.close()  # one that only was stopped kills what it forks for us later
            self._forget()
            return None
        if not self._is_kept():  # an engine before this one has started it
            self._forget()
            self._keeper = connect(self._home, Request(request.libraries), (1, 2))
        return ForkedProgram(connection, *forked)

    def _is_kept(self) -> bool:
        """Whether a fork server waits, or imports its libraries, because this process keeps it."""
        return self._keeper is not None and not _has_come(self._keeper.fileno())

    def _forget(self) -> None:
        """Let go of a fork server that has ended, or will soon."""
        if self._keeper is not None:
            self._keeper.close()
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.wait()
        self._keeper = self._fork_server = None

    def close(self) -> None:
        """Start nothing any more, and end the fork server."""
        if self._keeper is not None:
            with suppress(OSError):  # it has ended already
                self._keeper.sendall(END)
        self._forget()
