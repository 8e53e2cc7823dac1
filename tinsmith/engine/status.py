"""Tells the server what engine and workers do, for `tinsmith status`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tinsmith.engine.scheduler import OperationScheduler
from tinsmith.engine.worker_group import WorkerGroup
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Status

STATUS_S = 1.0
"""Least time between two reports."""


@dataclass(eq=False)
class StatusReporter:
    """Sends a `Status` when it is time and something has changed."""

    scheduler: OperationScheduler
    workers: WorkerGroup
    send: Callable[[Message], None]
    reported: Status | None = None
    due_at: float = 0.0

    def report(self) -> None:
        """Report what is due; call it often."""
        if (now := time.monotonic()) < self.due_at:
            return
        self.due_at = now + STATUS_S
        scheduler = self.scheduler
        models = [
            {
                "model_id": model_id,
                "base_model": model.base_model,
                "queued": scheduler.queued(model_id),
                "trained_tokens": scheduler.models[model_id].trained_tokens,
            }
            for model_id, model in scheduler.models.loaded.items()
        ]
        status = replace(self.workers.status, models=models, trained_tokens=scheduler.outcomes.trained_tokens)
        if status != self.reported:
            self.reported = status
            self.send(status)
