"""Runs inside a Ray actor: starts a worker's program as its child process, and reports its end.

The program ends when its parent, the actor, is gone, and Ray ends the actors of an engine that is gone.
"""

import contextlib
import os
import selectors
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

_LOOK_S = 0.2
"""Seconds between two looks whether a silent program has ended."""

_AT_ONCE = 65536

GIVEN_BY_RAY = ("CUDA_VISIBLE_DEVICES",)
"""Variables that a program has from its actor: which GPU is its own."""


PARENT = "PARENT"
"""A placeholder for the actor's process id, among the arguments of a program."""


class WorkerActor:
    """Runs one worker's program in an actor of Ray."""

    def run(
        self,
        command: list[str],
        standard_input: bytes,
        environment: dict[str, str],
        directory: str,
        node: str,
        shared: dict[str, str],
    ) -> Iterator[tuple[str, Any]]:
        """Start a program in a `directory`; PARENT in its arguments is replaced by this process's id.

        Yields ("pid", its id), ("output", bytes) as it writes them, and at last ("ended", its exit code). If this is
        not the `node` of Ray that was meant, or what the program needs is not here, it yields only ("refused", why).
        `shared` are files that the engine has written, one in each directory that it shares with workers, by the name
        of the directory's setting.
        """
        why = why_not(command[0], directory, node, shared)
        if why:
            yield "refused", why
            return
        given = {name: os.environ[name] for name in GIVEN_BY_RAY if name in os.environ}
        command = [str(os.getpid()) if each == PARENT else each for each in command]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment | given,
            cwd=directory,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        yield "pid", process.pid
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            process.stdin.write(standard_input)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while (runs := process.poll() is None) or selector.select(0):
                if selector.select(_LOOK_S if runs else 0):
                    text = os.read(process.stdout.fileno(), _AT_ONCE)
                    if not text:  # nobody has the pipe any more
                        break
                    yield "output", text
        yield "ended", process.wait()


def why_not(program: str, directory: str, node: str, shared: dict[str, str]) -> str:
    """Return why a program cannot be started here; empty if it can."""
    if ray.get_runtime_context().get_node_id() != node:
        return "Ray has moved it to another host meanwhile"
    here = socket.gethostname()
    if not Path(directory).is_dir():
        return (
            f"{here} has no directory {directory}, in which the server was started; start it in one that all hosts see"
        )
    if not os.access(program, os.X_OK):
        return f"{here} has no program {program}; install Tinsmith and Python at the same path on all hosts"
    for name, file in shared.items():
        home = Path(file).parent
        if not Path(file).is_file():
            return (
                f"{here} does not see the server's {name}={home}; mount the same file system at the same path on all "
                "hosts of Ray"
            )
        if not os.access(home, os.W_OK | os.X_OK):
            return (
                f"the user of Ray on {here} may not write to {name}={home}; "
                "start Ray as the user of the server on all hosts"
            )
    return ""
