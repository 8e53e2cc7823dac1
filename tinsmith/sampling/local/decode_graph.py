"""Decoding steps as CUDA graphs: a captured step is replayed with one call, instead of a thousand launches from Python.

There is a graph for each number of rows of a ladder, and for what changes the kernels of a step. A batch between two
rungs is computed with the dead rows behind it. A graph reads and writes where the tensors lay when it was captured: it
sees newer weights there, and if a tensor moves, all graphs are dropped.

A graph is captured when its rung is first needed, in the thread that computes passes and steps; other threads launch
only copies, which do not disturb that. On a CPU, and where capturing fails, the same function runs as it is; what
failed is tried again later, because memory may have been short.
"""

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.observing.metrics import WORKER_TIME
from tinsmith.sampling.local.decode_step import DecodeStep, StepRows
from tinsmith.sampling.local.device_batch import DeviceBatch

log = logging.getLogger(__name__)

RUNGS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows of which there are graphs; beyond the last, its multiples."""
PATIENCE = 2
"""Steps in a row that must need a rung before it is captured: a growing batch passes many."""


RETRY = 4096

_counts = Counter[str]()


class Kind(NamedTuple):
    """The key of a graph."""

    rows: int
    truncates: bool
    needs_logits: bool
    has_adapters: bool


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured step."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor | None
    """The logits that it writes; None if they are not needed."""


class StepRunner:
    """Runs the steps of one batch, as graphs where that is possible."""

    def __init__(self, step: DecodeStep, captures: bool) -> None:
        self.step = step
        self.captures = captures
        self.graphs: dict[Kind, Captured] = {}
        self.steps = 0
        self.eager: dict[Kind, int] = {}
        """Graphs that could not be captured, and the step from which on each is tried again."""
        self.wanted: tuple[Kind | None, int] = (None, 0)
        """The last missing graph, and how many steps in a row missed it."""
        self.places: Hashable = None
        self.pool: Any = None
        """The memory that all graphs share: only one runs at a time."""

    def __call__(self, batch: DeviceBatch, rows: StepRows) -> Tensor | None:
        """Run a step as `DecodeStep.__call__` does; logits are returned if `rows.needs_logits`."""
        if not self.captures or not self.step.can_be_captured(batch, rows):
            return self.step(batch, rows)
        self._drop_stale(batch)
        captured = self._find(batch, rows)
        if captured is None:
            return self.step(batch, rows)
        captured.graph.replay()
        return None if captured.logits is None else captured.logits[: rows.count]

    def _drop_stale(self, batch: DeviceBatch) -> None:
        places = self.step.places(), batch.state.data_ptr(), batch.table.data_ptr(), batch.drawn.data_ptr()
        if places != self.places:
            if self.graphs:
                log.info("memory that decoding reads has moved: %d graphs are captured again", len(self.graphs))
            self.graphs.clear()
            self.eager.clear()
            self.pool = None
            self.places = places

    def _find(self, batch: DeviceBatch, rows: StepRows) -> Captured | None:
        """Return the graph for these rows, captured now if it is time; until then a larger one, or None."""
        self.steps += 1
        rung = rung_of(rows.count, len(batch.state))
        wanted = _kind(rung, rows)
        found = self.graphs.get(wanted)
        if found is not None:
            return found
        if self.steps >= self.eager.get(wanted, 0):
            self.wanted = wanted, (self.wanted[1] + 1 if self.wanted[0] == wanted else 1)
            if self.wanted[1] >= PATIENCE:
                with WORKER_TIME.during("compiling"):
                    return self._capture(batch, replace(rows, count=rung), wanted)
        larger = (
            self.graphs.get(_kind(above, rows)) for above in (*RUNGS, len(batch.state)) if rung < above <= 2 * rung
        )
        return next((graph for graph in larger if graph is not None), None)

    def _capture(self, batch: DeviceBatch, rows: StepRows, kind: Kind) -> Captured | None:
        """Capture the step; returns None if that fails. Nothing is computed for the rows of the batch."""
        try:
            # Kernels are compiled and chosen outside of the capture, on rows that nobody has.
            idle = DeviceBatch(rows.count, batch.table.shape[1] - 1, batch.device, batch.scratch_slot, batch.columns)
            for _ in range(2):
                self.step(idle, rows, in_place=True)
            graph = torch.cuda.CUDAGraph()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                # A replay computes all of it or, if the device is lost, nothing that counts
                logits = self.step(batch, rows, in_place=True)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            reason = str(error).strip().partition("\n")[0]
            if kind not in self.eager:
                log.warning("decoding %d rows runs without a CUDA graph, which is slower: %s", rows.count, reason)
            self.eager[kind] = self.steps + RETRY
            captured = None
        else:
            self.eager.pop(kind, None)
            captured = self.graphs[kind] = Captured(graph, logits if rows.needs_logits else None)
            _counts["captured"] += 1
        if captured is None:
            torch.cuda.empty_cache()
        return captured


def captures() -> int:
    """Return the number of graphs captured so far. If it keeps growing, their memory moves again and again."""
    return _counts["captured"]


def rung_of(rows: int, most: int) -> int:
    """Return the number of rows that is computed for so many: the next rung, but no more than `most`."""
    rung = next((rung for rung in RUNGS if rung >= rows), -(-rows // RUNGS[-1]) * RUNGS[-1])
    return min(rung, most)


def _kind(rung: int, rows: StepRows) -> Kind:
    return Kind(rung, rows.truncates, rows.needs_logits, rows.has_adapters)
