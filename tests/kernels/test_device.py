"""Numbers on their way between a device and the host."""

import torch

from tests.bases import DEVICE
from tinsmith.kernels.device import STAGE_BYTES, to_host


def test_bytes_come_to_the_host_as_what_was_computed_before_has_left_them() -> None:
    """More than two stages of them, and the last is not full."""
    numbers = torch.arange(STAGE_BYTES // 4 * 2 + 5, dtype=torch.int32, device=DEVICE)
    for _ in range(50):
        numbers += 1
    host = to_host(numbers.view(torch.uint8))
    assert host.device.type == "cpu"
    assert torch.equal(host.view(torch.int32), torch.arange(len(numbers), dtype=torch.int32) + 50)
