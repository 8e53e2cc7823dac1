"""How weights get to a device."""

import pytest
import torch
from torch import nn

from tests.bases import DEVICE
from tinsmith.models import device
from tinsmith.models.device import move_weights


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
