"""Sensors of a GPU as its driver reads them (NVML): memory in use, utilization, temperature and power.

Where the driver or `nvidia-ml-py` is missing, or a card has no such sensor, its numbers are absent.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from prometheus_client import Gauge

from tinsmith.errors import reported
from tinsmith.observing.metrics import GPU_MEMORY, GPU_POWER, GPU_SIZE, GPU_TEMPERATURE, GPU_UTILIZATION

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sensor:
    """What is measured, by which function of a device, and how many of its units are one of the metric's."""

    metric: Gauge
    measure: Callable[[torch.device], int]
    scale: int = 1


SENSORS = {
    "memory": Sensor(GPU_MEMORY, torch.cuda.device_memory_used),
    "size": Sensor(GPU_SIZE, lambda device: torch.cuda.get_device_properties(device).total_memory),
    "utilization": Sensor(GPU_UTILIZATION, torch.cuda.utilization, 100),
    "temperature": Sensor(GPU_TEMPERATURE, torch.cuda.temperature),
    "power": Sensor(GPU_POWER, torch.cuda.power_draw, 1000),
}


class GpuSensors:
    """Those of one device; for one thread, which may wait for the driver."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.working = dict(SENSORS)
        """Sensors that have not failed."""

    def read(self) -> None:
        """Read all that can be read. A sensor that fails is not asked again."""
        for name, sensor in list(self.working.items()):
            with reported(Exception, partial(self._leave_out, name)):  # NVML's errors are only there where NVML is
                value = sensor.measure(self.device)
                sensor.metric.labels(str(self.device)).set(value / sensor.scale)

    def _leave_out(self, name: str, error: Exception) -> None:
        del self.working[name]
        log.info("the %s of %s is not measured: %s", name, self.device, error)
