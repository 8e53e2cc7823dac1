"""The machine: what memory it has, what this process holds and what a limit on it leaves; how weights get to its device."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.bases import DEVICE
from tinsmith.models import device
from tinsmith.models.device import move_weights
from tinsmith.models.machine import give_back_pinned_memory

SCRIPT = """
import resource
import psutil
from tinsmith.models import device
from tinsmith.models.device import move_weights
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


@pytest.mark.skipif(DEVICE == "cpu", reason="what stays on the CPU is not copied")
def test_weights_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their size and precision is beside that of a stage, tied ones still tied, and buffers too."""
    monkeypatch.setattr(device, "STAGE_BYTES", 1000)
    network = nn.Module()
    sizes = [(), (1,), (0, 3), (250,), (251,), (37, 91), (128, 64)]
    for number, size in enumerate(sizes):
        for dtype in (torch.float32, torch.bfloat16):
            network.register_parameter(f"{dtype}{number}".replace(".", "_"), nn.Parameter(torch.randn(size).to(dtype), requires_grad=False))
    network.turned = nn.Parameter(torch.randn(64, 32).t())
    network.tied = network.turned
    network.register_buffer("buffer", torch.arange(5))
    expected = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    move_weights(network, torch.device(DEVICE, torch.cuda.device_count() - 1))
    found = network.state_dict()
    assert network.tied is network.turned
    assert {tensor.device.type for tensor in found.values()} == {"cuda"}
    for name, tensor in expected.items():
        assert torch.equal(found[name].cpu(), tensor), name
