"""The program that an engine is. It imports its libraries before it is told how to start, so that one can stand by."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

ENGINE = (sys.executable, "-P", "-m", "tinsmith.engine")

_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Waiting threads of a pass sleep: where other processes need the cores, spinning makes it ten times slower."""


class EngineProgram:
    """A child process that imports an engine's libraries, and becomes an engine when it is told how."""

    def __init__(self, program: Sequence[str] = ENGINE) -> None:
        """Start `program` with our process id as its argument. It ends with the thread that calls this."""
        command = [*program, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**_ENVIRONMENT, **os.environ})
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.poll()

    def begin(self, start: bytes) -> None:
        """Tell it how to start, once: an `EngineStart` as bytes."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `ended` tells
            self._process.stdin.write(start)
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    async def ended(self) -> int:
        """Wait for its end; returns its exit code."""
        if (code := self.exit_code) is not None:
            return code
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        pidfd = os.pidfd_open(self.pid)
        loop.add_reader(pidfd, end.set)
        try:
            await end.wait()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait()

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self.exit_code is None:
            self._process.kill()

    def close(self) -> None:
        """End one that was told nothing, and wait for its end."""
        self.kill()
        self._process.communicate()
