"""Operations that have begun. Each is a generator: each `yield` is a call to a worker and returns its reply.

    steps = operations.start(command, ...)  # nothing has happened yet
    next(steps)  -> a call                  # the engine sends it to the worker, and goes on with other work
    steps.send({"metrics": ...})            # the answer; or steps.throw(error)
    StopIteration(value)                    # what the operation came to

So an operation that needs its worker twice and the database in between is one function, and no thread waits.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinsmith.engine.loaded_model import LoadedModel
from tinsmith.errors import StoreUnavailableError
from tinsmith.protocol.work import Call
from tinsmith.store.records import Command

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Wait:
    """The database takes nothing at the moment; go on (with `send`) when it is time to try again."""

    reason: StoreUnavailableError


Steps = Generator[Call | Wait, Any, T]


def until_stored(write: Callable[[], T]) -> Steps[T]:
    """The result of a write that must not fail for want of the database: what it belongs to has had its effect already."""
    while True:
        try:
            return write()
        except StoreUnavailableError as error:
            reason = error
        yield Wait(reason)


@dataclass(frozen=True)
class Ended:
    """Result of an operation."""

    result: dict[str, Any]
    """The reply to the client."""
    resolved: dict[str, Any] | None = None
    """Values that it read or wrote outside of its payload (`Outcome.resolved`)."""


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


class Saves:
    """Saves that are written and recorded while their models go on, because their state is already copied.

        Copied -> the worker writes the files -> Answer -> the row, once the database takes it -> the save has ended

    Each model has one at most, because a copy takes as much memory as the model: its next save waits in the queue for the end of this one.
    So two saves of one path come one after the other too.
    """

    def __init__(self) -> None:
        self.writing: dict[str, Running] = {}
        """Saves that are being written, by model."""
        self.next: set[str] = set()
        """Models whose next command is a save too, and waits."""

    @property
    def unrecorded(self) -> list[Running]:
        """Those whose files are there and whose rows the database has not taken yet."""
        return [saving for saving in self.writing.values() if saving.in_call is None]

    def begin(self, saving: Running, state: int) -> None:
        """The copy of a model's state is there."""
        saving.copied_state = state
        self.writing[saving.model_id] = saving

    def forget(self, model_id: str) -> None:
        """The model's save has ended, or nobody waits for it any more."""
        self.writing.pop(model_id, None)
        self.next.discard(model_id)

    def cut_short(self, models: Mapping[str, LoadedModel]) -> tuple[list[Running], list[Running]]:
        """The workers have ended: what they wrote is gone. Returns the saves that can begin anew, and those that cannot.

        A model comes back as its last step has left it. If that is the state that was copied, the same is saved again; if not, nothing is
        left of what was to be saved. Those that only wait for their rows go on.
        """
        cut = [saving for saving in self.writing.values() if saving.in_call is not None]
        anew = [saving for saving in cut if saving.model_id in models and models[saving.model_id].state == saving.copied_state]
        for saving in cut:
            self.forget(saving.model_id)
        self.next.clear()
        return anew, [saving for saving in cut if saving.model_id in models and saving not in anew]


def log_finished(command: Command, started_at: float, tokens: int, detail: str) -> None:
    """Log how much an operation was, what came out, how long it took (since monotonic `started_at`), and how long it had waited.

    The wait is counted by the clock, which two processes share and somebody may have set.
    """
    seconds = time.monotonic() - started_at
    log.info(
        "model=%s seq_id=%d kind=%s tokens=%d %s seconds=%.3f queued=%.3f",
        *(command.model_id, command.seq_id, command.kind, tokens, detail, seconds, max(0.0, time.time() - seconds - command.created_at)),
    )
