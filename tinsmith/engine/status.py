"""Telling the server what the engine does, for `tinsmith status`: at most once a second, and nothing while nothing changes."""

import dataclasses
import time
from collections.abc import Callable

from tinsmith.engine.messages import Message, Status
from tinsmith.engine.samples import Samples
from tinsmith.engine.trainer import Trainer
from tinsmith.models.machine import memory_held

EVERY_S = 1.0
"""Least time between two reports."""


class StatusReporter:
    """Sends a `Status` when it is time and something changed."""

    def __init__(self, trainer: Trainer, samples: Samples, send: Callable[[Message], None]) -> None:
        self.trainer = trainer
        self.samples = samples
        self.send = send
        self.reported: Status | None = None
        """The last report, without the memory: that always changes a little."""
        self.due = 0.0

    def report(self) -> None:
        """To be called whenever the engine has done something, and at least every few seconds."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + EVERY_S
        status = self._status()
        if status != self.reported:
            self.reported = status
            self.send(dataclasses.replace(status, memory=memory_held()))

    def _status(self) -> Status:
        running, waiting = self.samples.load()
        return Status(
            models=[
                {
                    "model_id": model_id,
                    "base_model": model.served.name,
                    "queued": self.trainer.queued(model_id),
                    "trained_tokens": self.trainer.trained_tokens[model_id],
                }
                for model_id, model in self.trainer.operations.models.items()
            ],
            running_samples=running,
            waiting_samples=waiting,
            trained_tokens=self.trainer.trained_tokens.total(),
            sampled_tokens=self.samples.sampled_tokens,
            memory={},
        )
