"""Operations are generators: each `yield` is a call to a worker and returns its reply.

    steps = operations.start(command, ...)  # nothing has happened yet
    next(steps)  -> a call                  # the engine sends it to the worker, and goes on with other work
    steps.send({"metrics": ...})            # the answer; or steps.throw(error)
    StopIteration(value)                    # what the operation came to

So an operation that needs its worker twice and the database in between is one function, and no thread waits.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from tinsmith.errors import StoreUnavailableError
from tinsmith.protocol.work import Call

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
