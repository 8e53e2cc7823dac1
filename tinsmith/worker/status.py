"""Reports a worker's work to the engine, at most once a second, and in the log from time to time."""

import dataclasses
import logging
import time
from collections.abc import Callable

from tinsmith.kernels.compiled import compilations
from tinsmith.models.machine import memory_held
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import WorkerStatus
from tinsmith.sampling.local.decode_graph import captures
from tinsmith.worker.samples import Samples

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Least time between two reports."""
SUMMARY_S = 10.0
"""Least time between two summaries in the log."""


class WorkerStatusReporter:
    """Sends a `WorkerStatus` when it is time and something changed."""

    def __init__(
        self,
        samples: Samples,
        send: Callable[[Message], None],
        paging: Callable[[], dict[str, int]] = dict[str, int],
    ) -> None:
        """`paging` returns `WorkerStatus.paging`."""
        self.samples = samples
        self.send = send
        self.paging = paging
        self.done = 0
        """Passes and calls that the device has done."""
        self.reported: object = None
        """Facts of the last report. Those of the memory are not among them: they always change a little."""
        self.due = 0.0
        self.summed_up = (time.monotonic(), 0, 0)
        """Monotonic time of the last summary, and the numbers of samples and tokens then."""
        self.graphs: dict[str, int] = {}
        """Numbers of graphs that were already logged."""

    def report(self) -> None:
        """Report and log what is due; call it after whatever the worker does, and at least every few seconds."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + EVERY_S
        if now - self.summed_up[0] >= SUMMARY_S:
            self.sum_up()
        running, waiting = self.samples.load()
        status = WorkerStatus(running, waiting, self.samples.results.sampled_tokens, {}, graphs_made(), self.paging())
        facts = self.done, self.samples.results.finished, status
        if facts != self.reported:
            self.reported = facts
            self.send(dataclasses.replace(status, memory=memory_held()))

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
