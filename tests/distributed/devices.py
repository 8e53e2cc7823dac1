"""Where the processes of these tests compute: on the CPU, or with TINSMITH_TEST_DEVICE=cuda each on its own GPU."""

import pytest
import torch

from tests.bases import DEVICE

ON_GPUS = DEVICE == "cuda"
EXACT = 1e-5 if ON_GPUS else 0.0
"""How far two computations of the same may differ, relative to the largest number.

On a GPU some kernels add up in the order in which their blocks come, and PyTorch chooses other kernels for the same
product in another process. What workers exchange is equal to the last bit there too.
"""
EXACT_IN_HALF = 2.0**-5 if ON_GPUS else 0.0
"""The same in bfloat16, in which each number is rounded to 8 bits."""
ROUNDING = 5 if ON_GPUS else 1
"""How many times as much as on a CPU float32 may differ, for trained models and for long sequences of hybrid ones.

On two H100 twice as much was seen.
"""
SERVER_OPTIONS = (
    ["--device", "cuda", "--dtype", "float32", "--memory-share", "0.12"] if ON_GPUS else ["--device", "cpu"]
)
"""Of every server. Several run at a time: the first worker of each has the first GPU."""


def here() -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPUS else torch.device("cpu")


def require_devices(count: int) -> None:
    """Skip a test on a machine that has fewer GPUs than it needs processes."""
    if ON_GPUS and torch.cuda.device_count() < count:
        pytest.skip(f"each of {count} processes needs a GPU of its own, and there are {torch.cuda.device_count()}")
