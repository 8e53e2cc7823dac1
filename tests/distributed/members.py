"""Tests that run in several processes at once, which compute together.

A function under `in_processes` is such a test. So many processes are started once for all tests of a module, and go
through them in their order, each as `main` says; pytest asks whether a test has passed in all of them. A tiny model of
each kind lies below DIRECTORY/bases.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import TracebackException
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import load
from tests.distributed.devices import ON_GPUS, here, require_devices
from tests.extent import EVERYTHING
from tests.running import START_S
from tinsmith.models.base import BaseModel
from tinsmith.protocol.place import Place
from tinsmith.training.parallel.process_group import ProcessGroup

ROOT = Path(__file__).parents[2]


class Member:
    """One of these processes."""

    def __init__(self, rank: int, count: int, directory: Path) -> None:
        self.rank, self.count, self.directory = rank, count, directory
        torch.set_num_threads(1)
        if ON_GPUS:
            torch.cuda.set_device(rank)
        self.group = ProcessGroup(Place(rank, count, f"file://{directory}/meeting"), here())
        self._number = 0

    def base(self, name: str, **options: Any) -> BaseModel:
        """A tiny model."""
        return load(self.directory / "bases" / name, **{"device": str(here())} | options)

    def wait(self) -> None:
        """Wait for the others."""
        self.group.agree(0, "that all have come here")

    def of_all(self, value: Any, everywhere: bool = True) -> list[Any]:
        """What each of them has, by rank; tensors on the CPU.

        Unless it is wanted everywhere, others than the first get nothing.
        """
        self._number += 1
        files = [self.directory / f"{self._number}-{rank}.pt" for rank in range(self.count)]
        torch.save(value, files[self.rank])
        self.wait()
        if self.rank > 0 and not everywhere:
            return []
        return [torch.load(file, map_location="cpu", weights_only=True) for file in files]


@dataclass(frozen=True)
class Ended:
    """What such processes have come to."""

    passed: set[str]
    said: str
    """By those that have failed."""

    def require(self, test: str) -> None:
        """Fail unless it passed in all of them."""
        assert test in self.passed, self.said or "none has come to it"


Processes = Callable[[str, int], Ended]
"""So many processes of a module."""
_TESTS = defaultdict[str, list[tuple[Callable[[Member], None], set[int]]]](list)
"""What the processes of a module go through, and how many have to be there for that."""


def in_processes(*counts: Any) -> Callable[[Callable[[Member], None]], Callable[..., None]]:
    """Make a test of a function that is called in as many processes, once for each of the counts."""

    def register(body: Callable[[Member], None]) -> Callable[..., None]:
        wanted = {
            count if isinstance(count, int) else count.values[0]
            for count in counts
            if isinstance(count, int) or EVERYTHING
        }
        _TESTS[body.__module__].append((body, wanted))

        @pytest.mark.parametrize("count", counts)
        def test(processes: Processes, count: int) -> None:
            processes(body.__module__, count).require(body.__name__)

        test.__doc__ = body.__doc__
        return test

    return register


def run(module: str, count: int, directory: Path) -> Ended:
    """Let so many processes go through the tests of a module. The first that fails ends all."""
    require_devices(count)
    command = [sys.executable, "-c", "from tests.distributed.members import main; main()", module]
    running = [subprocess.Popen([*command, str(rank), str(count), str(directory)], cwd=ROOT) for rank in range(count)]
    deadline = time.monotonic() + START_S
    try:
        while (
            time.monotonic() < deadline
            and {process.poll() for process in running} & {None}
            and not any(p.poll() for p in running)
        ):
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
            process.wait()
    failed = [file.read_text() for file in sorted(directory.glob("failed *"))]
    passed = (directory / "passed").read_text().splitlines() if (directory / "passed").exists() else []
    said = "\n".join(failed) or f"exit codes {[process.returncode for process in running]}" * any(
        p.returncode for p in running
    )
    return Ended(set(passed) - {text.partition("\n")[0] for text in failed}, said)


def main() -> None:
    """Be one of the processes. The last test of a module may end the others, so nobody takes leave of them."""
    module, rank, count, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    import_module(module)
    torch.set_printoptions(threshold=10)
    np.set_printoptions(threshold=10)
    member, name = Member(rank, count, directory), ""
    try:
        for body, counts in _TESTS[module]:
            if count in counts:
                name = body.__name__
                member.wait()
                body(member)
                if rank == 0:
                    with (directory / "passed").open("a") as passed:
                        passed.write(f"{name}\n")
    except BaseException as error:  # noqa: BLE001 - the test says it
        trace = "".join(TracebackException.from_exception(error).format())
        (directory / f"failed {rank}").write_text(f"{name}\nin process {rank}: {trace}")
        os._exit(1)
    os._exit(0)
