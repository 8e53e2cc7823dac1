"""What runs inside an actor of Ray: it starts the program of a worker as its child process, and tells what becomes of it.

The program is the one that the engine would start itself. It ends when its parent, the actor, is gone, and Ray ends the actors of an
engine that is gone.
"""

import contextlib
import os
import selectors
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LOOK_S = 0.2
"""Seconds between two looks whether the program has ended, while it says nothing."""

_AT_ONCE = 65536
"""Most bytes of its output that are told at once."""

GIVEN_BY_RAY = ("CUDA_VISIBLE_DEVICES",)
"""Variables that a program has from its actor: which GPU is its own."""


PARENT = "PARENT"
"""In the place of the actor's process id, among the arguments of a program."""


class WorkerActor:
    """Runs one program."""

    def run(
        self, command: list[str], standard_input: bytes, environment: dict[str, str], directory: str, data_dir: str, files: tuple[int, int]
    ) -> Iterator[tuple[str, Any]]:
        """Start a program; PARENT in its arguments is replaced by this process's id.

        Yields ("pid", its id), ("output", bytes) as it writes them, and at last ("ended", its exit code). If `data_dir` is not the
        directory with the device and inode of `files` here, nothing is started, and that is ("refused", why).
        """
        if identity(data_dir) != files:
            yield (
                "refused",
                f"Ray does not see the server's data_dir={data_dir}; start Ray beside the server, with the same file systems",
            )
            return
        given = {name: os.environ[name] for name in GIVEN_BY_RAY if name in os.environ}
        command = [str(os.getpid()) if each == PARENT else each for each in command]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment | given, cwd=directory
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


def identity(directory: str) -> tuple[int, int] | None:
    """By which a directory is known to all processes of a host that see it; None if it is not there."""
    with contextlib.suppress(OSError):
        found = Path(directory).stat()
        return found.st_dev, found.st_ino
    return None
