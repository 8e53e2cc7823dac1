"""Operations that have begun, and the log line of each when it has ended."""

import logging
import time
from dataclasses import dataclass, field

from tinsmith.engine.operations import Ended
from tinsmith.engine.steps import Steps
from tinsmith.store.records import Command

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Running:
    """An operation that waits for its worker, or for the database."""

    model_id: str
    steps: Steps[Ended]
    command: Command | None
    """None if the server saves a model that it is going to unload."""
    started_at: float = field(default_factory=time.monotonic)
    """Monotonic time of its start."""
    in_call: int | None = None
    """The number of the call that it waits for; None if it waits for the database."""
    has_begun: bool = False
    """Whether it has come to its first call: before that nothing of it has happened."""
    copied_state: int | None = None
    """State of the model (`LoadedModel.state`) that a save has copied. The model goes on meanwhile."""


def log_finished(command: Command, started_at: float, tokens: int, detail: str) -> None:
    """One line for each finished operation: how much it was, what came out, how long it took, how long it had waited.

    `started_at` is monotonic time. How long it waited is counted by the clock, which two processes share and somebody may have set.
    """
    seconds = time.monotonic() - started_at
    log.info(
        "model=%s seq_id=%d kind=%s tokens=%d %s seconds=%.3f queued=%.3f",
        command.model_id,
        command.seq_id,
        command.kind,
        tokens,
        detail,
        seconds,
        max(0.0, time.time() - seconds - command.created_at),
    )
