"""Tells of a worker's work: in the numbers that its reports have, and in the log from time to time."""

import logging
import time
from collections.abc import Callable, Collection

import torch

from tinsmith.kernels.compiled import compilations
from tinsmith.models.machine import memory_held
from tinsmith.observing.metrics import (
    GRAPHS,
    MEMORY,
    MODEL_SAMPLED_TOKENS,
    PAGING,
    PLACES,
    SEQUENCES,
    WORKER,
    WORKER_TIME,
    numbers,
)
from tinsmith.observing.spans import SPANS
from tinsmith.protocol.reports import pause_s
from tinsmith.protocol.work import WorkerStatus
from tinsmith.sampling.local.decode_graph import captures
from tinsmith.worker.gpu_sensors import GpuSensors
from tinsmith.worker.samples import Samples

log = logging.getLogger(__name__)

SUMMARY_S = 10.0
"""Least time between two summaries in the log."""


class WorkerBoard:
    """Notes what only the device's thread can look at, and has all numbers for the thread of the `Reports`."""

    def __init__(
        self,
        samples: Samples,
        paging: Callable[[], dict[str, int]],
        models: Callable[[], Collection[str]],
        devices: Collection[torch.device],
    ) -> None:
        """`paging` returns `StatePager.facts`, `models` the ids of the loaded models."""
        self.samples = samples
        self.paging = paging
        self.models = models
        self.sensors = [GpuSensors(device) for device in devices if device.type == "cuda"]
        self.due_at = 0.0
        self.summed_up = (time.monotonic(), 0, 0)
        """Monotonic time of the last summary, and the numbers of samples and tokens then."""
        self.graphs: dict[str, int] = {}
        """Numbers of graphs that were already logged."""

    def make(self) -> WorkerStatus:
        """Return all numbers; for another thread."""
        for place, size in memory_held().items():
            MEMORY.labels(place).set(size)
        for kind, count in graphs_made().items():
            GRAPHS.labels(kind).set(count)
        for sensors in self.sensors:
            sensors.read()
        WORKER_TIME.flush()
        return WorkerStatus(numbers(WORKER), SPANS.take())

    def note(self) -> None:
        """Note and log what is due; call it after whatever the worker does, and at least every few seconds."""
        now, began = time.monotonic(), time.thread_time()
        if now < self.due_at:
            return
        if now - self.summed_up[0] >= SUMMARY_S:
            self.sum_up()
        for name, base in self.samples.bases.items():
            running, waiting = base.load
            SEQUENCES.labels(name, "running").set(running)
            SEQUENCES.labels(name, "waiting").set(waiting)
            PLACES.labels(name).set(base.sampler.places)
        for fact, value in self.paging().items():
            PAGING.labels(fact).set(value)
        self._forget_unloaded()
        self.due_at = time.monotonic() + pause_s(time.thread_time() - began)

    def _forget_unloaded(self) -> None:
        """Let the numbers of models that are gone disappear."""
        sampled = self.samples.results.sampled_models
        for model_id in sampled.difference(self.models()):
            sampled.discard(model_id)
            MODEL_SAMPLED_TOKENS.remove(model_id)

    def sum_up(self) -> None:
        """Log what was sampled and which graphs were made since the last summary; nothing if there was nothing."""
        since, samples, tokens = self.summed_up
        results = self.samples.results
        self.summed_up = (time.monotonic(), results.finished, results.sampled_tokens)
        new, new_tokens, seconds = (
            results.finished - samples,
            results.sampled_tokens - tokens,
            self.summed_up[0] - since,
        )
        if new:
            log.info(
                "samples: %d finished, %d tokens in %.0f s (%.0f tokens/s)",
                new,
                new_tokens,
                seconds,
                new_tokens / seconds,
            )
        made = graphs_made()
        more = {kind: count - self.graphs.get(kind, 0) for kind, count in made.items()}
        self.graphs = made
        if any(more.values()):
            log.info(
                "graphs of operations: %s",
                ", ".join(f"{count} {kind}, {more[kind]} of them new" for kind, count in made.items()),
            )


def graphs_made() -> dict[str, int]:
    """Return the number of graphs captured by this process, by kind."""
    return {"compiled": compilations(), "captured": captures()}
