"""Where the processes that tests here start compute: all on the CPU, or with TINSMITH_TEST_DEVICE=cuda each on a GPU of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bases import DEVICE
from tests.running import START_S
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.protocol.place import Place

ON_GPUS = DEVICE == "cuda"
EXACT = 1e-5 if ON_GPUS else 0.0
"""How far two computations of the same may differ, of the largest number. On a GPU some kernels add up in the order in which their blocks
come, and PyTorch chooses others for the same product in another process. What workers exchange is equal to the last bit there too."""
EXACT_IN_HALF = 2.0**-5 if ON_GPUS else 0.0
"""The same in bfloat16, in which each number is rounded to 8 bits."""
ROUNDING = 5 if ON_GPUS else 1
"""How many times as much as on a CPU models that a server has trained, and long sequences of hybrid ones, may differ in float32. On two
H100 twice as much was seen."""
SERVER_OPTIONS = ["--device", "cuda", "--dtype", "float32", "--memory-share", "0.12"] if ON_GPUS else ["--device", "cpu"]
"""Of every server. Several run at a time: the first worker of each has the first GPU."""


def here() -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPUS else torch.device("cpu")


def require_devices(count: int) -> None:
    """Skip a test on a machine that has fewer GPUs than it needs processes."""
    if ON_GPUS and torch.cuda.device_count() < count:
        pytest.skip(f"each of {count} processes needs a GPU of its own, and there are {torch.cuda.device_count()}")


def found_by(module: str, count: int, directory: Path) -> list[dict[str, Any]]:
    """What so many processes find that each run `python -m tests.distributed.MODULE RANK COUNT DIRECTORY`."""
    require_devices(count)
    command = [sys.executable, "-m", f"tests.distributed.{module}"]
    running = [subprocess.Popen([*command, str(rank), str(count), str(directory)], cwd=Path(__file__).parents[2]) for rank in range(count)]
    try:
        assert [process.wait(START_S) for process in running] == [0] * count, directory
    finally:
        for process in running:
            process.kill()
    return [torch.load(directory / f"{rank}.pt", map_location="cpu", weights_only=True) for rank in range(count)]


class Member:
    """One of these processes. It goes through all cases, in the same order as the others, and keeps what each came to."""

    def __init__(self) -> None:
        self.rank, self.count, self.directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
        torch.set_num_threads(1)
        if ON_GPUS:
            torch.cuda.set_device(self.rank)
        self.group = ProcessGroup(Place(self.rank, self.count, f"file://{self.directory}/meeting"), here())
        self.found: dict[str, Any] = {}

    def save(self) -> None:
        """Leave what was found for the test."""
        torch.save(self.found, self.directory / f"{self.rank}.pt")
