"""Memory of the host that a GPU reads, and how weights get to a device."""

import pytest
import torch
from torch import nn

from tests.bases import DEVICE
from tinsmith.kernels import device
from tinsmith.kernels.device import move_weights
from tinsmith.models.machine import give_back_pinned_memory


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
            network.register_parameter(
                f"{dtype}{number}".replace(".", "_"), nn.Parameter(torch.randn(size).to(dtype), requires_grad=False)
            )
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
