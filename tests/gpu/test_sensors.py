"""The sensors of a real GPU."""

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.observing.metrics import WORKER
from tinsmith.worker.gpu_sensors import GpuSensors

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def test_a_gpu_tells_its_memory_utilization_temperature_and_power() -> None:
    def value(name: str) -> float:
        found = WORKER.get_sample_value(f"tinsmith_gpu_{name}", {"gpu": "cuda:0"})
        assert found is not None
        return found

    held = torch.ones(2**28, device="cuda:0")
    GpuSensors(torch.device("cuda:0")).read()
    assert held.nbytes < value("memory_used_bytes") <= value("memory_bytes")
    assert value("memory_bytes") == torch.cuda.get_device_properties(0).total_memory
    assert 0 <= value("utilization_ratio") <= 1
    assert 0 < value("temperature_celsius") < 120
    assert 1 < value("power_watts") < 3000
