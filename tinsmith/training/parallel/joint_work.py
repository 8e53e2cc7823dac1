"""Computations of several workers with exchanges in between, which either all finish or all leave at the same place.

A worker that fails alone, as where its memory ends, would let the others wait in the next exchange for ever. So before each exchange all
agree that everybody has come to it, with a number that the processors exchange while the devices compute. One that has failed says so in
the place of its next agreement. Then all stop, at the same place, and know why.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.training.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

_GOES_ON, _OUT_OF_MEMORY, _FAILED = 0, 1, 2
"""States that workers exchange when all agree."""


class OthersFailedError(Exception):
    """Another worker has failed, so that this one does not go on."""


@dataclass(frozen=True)
class JointFailure:
    """The reason why nobody has a result, the same on all workers."""

    error_type: str
    """Name of the class of the first failed worker's error."""
    reason: str
    out_of_memory: bool
    """Whether all that failed had too little memory."""


def refuse_together(group: ProcessGroup, failure: Exception | None) -> None:
    """Raise on all workers if one has failed at what each does for itself: UserError if all failures are, TinsmithError otherwise."""
    said = group.gather(_GOES_ON if failure is None else _FAILED if isinstance(failure, UserError) else _OUT_OF_MEMORY)
    if not any(said):
        return
    reasons = group.texts("" if failure is None else str(failure) or type(failure).__name__)
    first = next(rank for rank, each in enumerate(said) if each)
    kind = UserError if _OUT_OF_MEMORY not in said else TinsmithError
    raise kind(f"worker {first} of {group.count}: {reasons[first]}") from failure


@contextmanager
def failing_together(group: ProcessGroup, *kinds: type[Exception]) -> Iterator[None]:
    """Run what each worker does for itself; if that fails with one of `kinds` on any, raise on all, as `refuse_together` does."""
    failure: Exception | None = None
    try:
        yield
    except kinds as error:
        if not isinstance(error, TinsmithError):
            log.warning("what each worker does for itself failed here", exc_info=True)
        failure = error
    refuse_together(group, failure)


class JointWork:
    """Work that all workers of a group do together: each calls the same methods in the same order."""

    def __init__(self, group: ProcessGroup, is_out_of_memory: Callable[[Exception], bool]) -> None:
        self.group = group
        self.is_out_of_memory = is_out_of_memory

    def attempt(self, compute: Callable[[], T]) -> T | JointFailure:
        """Return the result of `compute` if it succeeds on all workers. It may exchange with the methods below.

        Raises DeviceLostError if this worker does: nobody can go on then.
        """
        said, name, reason = _GOES_ON, "", ""
        try:
            result = compute()
        except DeviceLostError:
            raise
        except OthersFailedError:
            return self._failure("", "", _GOES_ON)
        except TinsmithError as error:
            said, name, reason = _FAILED, type(error).__name__, str(error)
        except Exception as error:  # of whatever kind: the others wait for what this one says
            said = _OUT_OF_MEMORY if self.is_out_of_memory(error) else _FAILED
            log.warning("what all workers compute together failed here", exc_info=said == _FAILED)
            name, reason = TinsmithError.__name__, f"{type(error).__name__}: {error}"
        if any(self.group.gather(said)):
            return self._failure(name, reason, said)
        return result

    def _failure(self, name: str, reason: str, said: int) -> JointFailure:
        """The failure of those that have failed, put together on all workers."""
        severest = max(self.group.gather(said))
        names, reasons = self.group.texts(name), self.group.texts(reason)
        first = next(rank for rank, each in enumerate(names) if each)
        return JointFailure(names[first], reasons[first], severest == _OUT_OF_MEMORY)

    def agree_to_go_on(self) -> None:
        """Before something is exchanged, when all that it needs is in memory. Raises OthersFailedError if not all have come here."""
        if any(self.group.gather(_GOES_ON)):
            raise OthersFailedError

    def exchange(self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        """Give each worker the next of `sizes` numbers of `sent`; returns what each gives to this one, `received_sizes` numbers."""
        sent = sent.contiguous()  # one column of a matrix, made flat, still lies apart in memory
        received = sent.new_empty(sum(received_sizes))
        self.agree_to_go_on()
        self.group.exchange(received, sent, received_sizes, sizes)
        return received

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum of those of all workers."""
        self.agree_to_go_on()
        self.group.sum(tensor)
