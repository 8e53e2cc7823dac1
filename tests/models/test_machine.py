"""The machine: what memory it has, what this process holds and what a limit on it leaves."""

import os
import subprocess
import sys

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.models.machine import give_back_pinned_memory

SCRIPT = """
import resource
import psutil
from tinsmith.models.machine import look_around, memory_held
machine, before = look_around(), memory_held()["resident"]
block = b"1" * 2**26
print(0 < machine.memory_available <= machine.memory_total <= psutil.virtual_memory().total)
print(memory_held()["resident"] - before > len(block) // 2)
spare = 2**28
resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + spare, resource.RLIM_INFINITY))
print(0 < look_around().memory_available <= spare)
"""


def test_memory_is_counted_in_bytes_and_a_limit_on_the_address_space_is_obeyed() -> None:
    """Without GPUs, whose driver reserves more addresses than the limit leaves."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True"] * 3, done.stderr


@pytest.mark.skipif(DEVICE != "cuda", reason="pins memory")
def test_pinned_memory_that_nobody_uses_is_given_back() -> None:
    """Memory that was copied to a GPU, as that of passes, and memory that was not."""

    def pinned() -> int:
        return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])

    torch.zeros(1, device=DEVICE)
    give_back_pinned_memory()
    before = pinned()
    held = [torch.zeros(2**26, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    held[0].to(DEVICE, non_blocking=True)
    torch.cuda.synchronize()
    held.clear()
    assert pinned() - before == 2**27
    give_back_pinned_memory()
    assert pinned() == before
