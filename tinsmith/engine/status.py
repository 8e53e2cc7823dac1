"""Reports the work of engine and workers for `tinsmith status`: at most once a second, and only on changes."""

import time
from collections.abc import Callable

from tinsmith.engine.trainer import Trainer
from tinsmith.engine.worker_group import WorkerGroup
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Status

EVERY_S = 1.0
"""Least time between two reports."""


class StatusReporter:
    """Sends a `Status` when it is time and something changed."""

    def __init__(self, trainer: Trainer, workers: WorkerGroup, send: Callable[[Message], None]) -> None:
        self.trainer = trainer
        self.workers = workers
        self.send = send
        self.reported: Status | None = None
        self.due = 0.0

    def report(self) -> None:
        """Call it whenever the engine has done something, and at least every few seconds."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + EVERY_S
        status = self._status()
        if status != self.reported:
            self.reported = status
            self.send(status)

    def _status(self) -> Status:
        together = self.workers.status
        return Status(
            models=[
                {
                    "model_id": model_id,
                    "base_model": model.base_model,
                    "queued": self.trainer.queued(model_id),
                    "trained_tokens": self.trainer.trained_tokens[model_id],
                }
                for model_id, model in self.trainer.operations.models.items()
            ],
            workers=self.workers.shown,
            running_samples=together.running_samples,
            waiting_samples=together.waiting_samples,
            trained_tokens=self.trainer.trained_before + self.trainer.trained_tokens.total(),
            sampled_tokens=self.workers.sampled_tokens,
            memory=together.memory,
            graphs=together.graphs,
        )
