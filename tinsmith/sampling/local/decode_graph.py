"""Decoding steps as CUDA graphs: a step that was captured once is replayed with one call, instead of a thousand launches from Python.

There is a graph for each number of rows of a ladder, and for what changes the kernels of a step: whether rows have adapters, whether they
truncate, whether their logits are needed afterwards. A batch between two rungs is computed with the dead rows behind it. A graph reads and
writes where the tensors lay when it was captured: what is written into them later, such as newer weights of an adapter, it sees; if one of
them lies elsewhere, all graphs are dropped.

A graph is captured when its rung is first needed, in the thread that computes passes and steps. Other threads launch only copies, which do
not disturb the capture of this thread. On a CPU, and where capturing fails, the same function runs as it is; what failed
is tried again later, because memory may have been short.
"""

import logging
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinsmith.sampling.local.decode_step import DecodeStep, StepRows
from tinsmith.sampling.local.device_batch import DeviceBatch

log = logging.getLogger(__name__)

RUNGS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows of which there may be a graph; beyond the last, its multiples."""
PATIENCE = 2
"""Number of steps in a row that must need a rung before it is captured: a growing batch passes many."""


RETRY = 4096
"""Steps after which a graph that could not be captured is tried again."""

_counts = Counter[str]()
"""Graphs captured by this process."""


class Kind(NamedTuple):
    """Key that tells graphs apart."""

    rows: int
    truncates: bool
    needs_logits: bool
    has_adapters: bool


@dataclass(frozen=True, eq=False)
class Captured:
    """A step as a graph."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor | None
    """Tensor to which it writes the logits; None if they are not needed."""


class StepRunner:
    """Runs the steps of one batch: as graphs where that is possible."""

    def __init__(self, step: DecodeStep, captures: bool) -> None:
        self.step = step
        self.captures = captures
        self.graphs: dict[Kind, Captured] = {}
        self.steps = 0
        """Number of steps so far."""
        self.eager: dict[Kind, int] = {}
        """Graphs that could not be captured, and the step from which on each is tried again."""
        self.wanted: tuple[Kind | None, int] = (None, 0)
        """The last graph that was missing, and how many steps in a row missed it."""
        self.places: Hashable = None
        """Addresses of the tensors that the graphs read."""
        self.pool: Any = None
        """The memory that all graphs share: only one of them runs at a time."""

    def __call__(self, batch: DeviceBatch, rows: StepRows) -> Tensor | None:
        """Run a step as `DecodeStep.__call__` does; the logits are there if `rows.needs_logits`."""
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
        """The graph for these rows, captured now if it is time; until then a larger one. None if the step must run as it is."""
        self.steps += 1
        rung = rung_of(rows.count, len(batch.state))
        wanted = _kind(rung, rows)
        found = self.graphs.get(wanted)
        if found is not None:
            return found
        if self.steps >= self.eager.get(wanted, 0):
            self.wanted = wanted, (self.wanted[1] + 1 if self.wanted[0] == wanted else 1)
            if self.wanted[1] >= PATIENCE:
                return self._capture(batch, replace(rows, count=rung), wanted)
        larger = (self.graphs.get(_kind(above, rows)) for above in (*RUNGS, len(batch.state)) if rung < above <= 2 * rung)
        return next((graph for graph in larger if graph is not None), None)

    def _capture(self, batch: DeviceBatch, rows: StepRows, kind: Kind) -> Captured | None:
        """The step as a graph; None if that fails, and for a while from then on. Nothing is computed for the rows of the batch."""
        try:
            # Kernels are compiled and chosen outside of the capture, on rows that nobody has.
            idle = DeviceBatch(rows.count, batch.table.shape[1] - 1, batch.device, batch.scratch_slot, batch.columns)
            for _ in range(2):
                self.step(idle, rows, in_place=True)
            graph = torch.cuda.CUDAGraph()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                logits = self.step(batch, rows, in_place=True)  # a replay computes all of it or, if the device is lost, nothing that counts
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
    """Return the number of graphs captured so far; a number that keeps growing means that their memory moves again and again."""
    return _counts["captured"]


def rung_of(rows: int, most: int) -> int:
    """The number of rows that is computed for so many: the next rung, but no more than `most`."""
    rung = next((rung for rung in RUNGS if rung >= rows), -(-rows // RUNGS[-1]) * RUNGS[-1])
    return min(rung, most)


def _kind(rung: int, rows: StepRows) -> Kind:
    return Kind(rung, rows.truncates, rows.needs_logits, rows.has_adapters)
