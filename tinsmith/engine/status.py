"""Telling what the engine does: the server, for `tinsmith status`, at most once a second; the log, a line on samples from time to time.

Nothing is said while nothing changes.
"""

import dataclasses
import logging
import time
from collections.abc import Callable

from tinsmith.engine.samples import Samples
from tinsmith.engine.trainer import Trainer
from tinsmith.models.machine import memory_held
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Status

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""Least time between two reports."""
SUMMARY_S = 10.0
"""Least time between two lines on samples: there may be thousands of them a minute."""


class StatusReporter:
    """Sends a `Status` when it is time and something changed."""

    def __init__(self, trainer: Trainer, samples: Samples, send: Callable[[Message], None]) -> None:
        self.trainer = trainer
        self.samples = samples
        self.send = send
        self.reported: Status | None = None
        """The last report, without the memory: that always changes a little."""
        self.due = 0.0
        self.summed_up = (time.monotonic(), 0, 0)
        """When the log last got its line on samples (monotonic), and how many samples and tokens there had been."""

    def report(self) -> None:
        """To be called whenever the engine has done something, and at least every few seconds."""
        now = time.monotonic()
        if now < self.due:
            return
        self.due = now + EVERY_S
        if now - self.summed_up[0] >= SUMMARY_S:
            self.sum_up()
        status = self._status()
        if status != self.reported:
            self.reported = status
            self.send(dataclasses.replace(status, memory=memory_held()))

    def sum_up(self) -> None:
        """Log how much was sampled since this was last done, if anything was."""
        since, samples, tokens = self.summed_up
        self.summed_up = (time.monotonic(), self.samples.finished, self.samples.sampled_tokens)
        new, new_tokens, seconds = self.samples.finished - samples, self.samples.sampled_tokens - tokens, self.summed_up[0] - since
        if new:
            log.info("samples: %d finished, %d tokens in %.0f s (%.0f tokens/s)", new, new_tokens, seconds, new_tokens / seconds)

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
            trained_tokens=self.trainer.trained_before + self.trainer.trained_tokens.total(),
            sampled_tokens=self.samples.sampled_tokens,
            memory={},
        )
