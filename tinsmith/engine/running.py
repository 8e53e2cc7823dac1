"""Operations that have begun. Each is a generator: each `yield` is a call to a worker and returns its reply.

    steps = operations.start(command, ...)  # nothing has happened yet
    next(steps)  -> a call                  # the engine sends it to the worker, and goes on with other work
    steps.send({"metrics": ...})            # the answer; or steps.throw(error)
    StopIteration(Ended(...))               # what the operation came to

Where the database takes nothing, a step yields the reason, and is sent None when it is time to try again. So an operation that needs its
worker twice and the database in between is one function, and no thread waits.
"""

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tinsmith.errors import StoreUnavailableError, TinsmithError
from tinsmith.protocol.work import Call
from tinsmith.store.records import Command

T = TypeVar("T")


Steps = Generator[Call | StoreUnavailableError, Any, T]


def until_stored(write: Callable[[], T]) -> Steps[T]:
    """The result of a write that must not fail for want of the database: what it belongs to has had its effect already."""
    while True:
        try:
            return write()
        except StoreUnavailableError as error:
            reason = error
        yield reason


@dataclass(frozen=True)
class Ended:
    """Result of an operation."""

    result: dict[str, Any]
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
    in_call: int | None = None
    """The number of the call that it waits for; None if it waits for the database."""
    has_begun: bool = False
    """Whether it has come to its first call: before that nothing of it has happened."""
    copied_state: int | None = None
    """State of the model (`LoadedModel.state`) that a save has copied. The model goes on meanwhile."""

    def step(self, answer: dict[str, Any] | TinsmithError | None) -> Call | StoreUnavailableError | Ended:
        """Go on with the answer to the last call, to the next call, to a wait for the database, or to the end. Raises TinsmithError."""
        try:
            return self.steps.throw(answer) if isinstance(answer, TinsmithError) else self.steps.send(answer)
        except StopIteration as end:
            ended: Ended = end.value
            return ended
