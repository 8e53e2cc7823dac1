"""Computations of several workers with exchanges in between, which either all finish or all leave at the same place.

A worker that fails alone, as where its memory ends, would let the others wait in the next exchange for ever. So before
each exchange all agree, over the processors, that everybody has come to it; one that has failed says so in its place,
and all stop there.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.memory.retries import PassFailure, attempted
from tinsmith.training.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)

T = TypeVar("T")

_GOES_ON, _OUT_OF_MEMORY, _FAILED = 0, 1, 2
"""States that workers exchange when all agree."""


class OthersFailedError(Exception):
    """Another worker has failed, so that this one does not go on."""


def raise_on_all(group: ProcessGroup, failure: Exception | None) -> None:
    """Raise on all workers if one failed at its own work: UserError if all failures are, TinsmithError otherwise."""
    said = group.gather(_GOES_ON if failure is None else _FAILED if isinstance(failure, UserError) else _OUT_OF_MEMORY)
    if not any(said):
        return
    reasons = group.texts("" if failure is None else str(failure) or type(failure).__name__)
    first = next(rank for rank, each in enumerate(said) if each)
    kind = UserError if _OUT_OF_MEMORY not in said else TinsmithError
    raise kind(f"worker {first} of {group.count}: {reasons[first]}") from failure


@contextmanager
def failing_on_all(group: ProcessGroup, *kinds: type[Exception]) -> Iterator[None]:
    """Run each worker's own work; if it fails with one of `kinds` on any, raise on all, as `raise_on_all` does."""
    try:
        yield
    except kinds as error:
        if not isinstance(error, TinsmithError):
            log.warning("what each worker does for itself failed here", exc_info=True)
        raise_on_all(group, error)
        raise
    raise_on_all(group, None)


def _said_of(failure: PassFailure | None) -> int:
    return _GOES_ON if failure is None else _OUT_OF_MEMORY if failure.out_of_memory else _FAILED


class JointWork:
    """Work that all workers of a group do together: each calls the same methods in the same order."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def attempt(self, compute: Callable[[], T]) -> T | PassFailure:
        """Return the result of `compute` if it succeeds on all workers, or the same failure on all.

        It may exchange with the methods below.

        Raises DeviceLostError if this worker does: nobody can go on then.
        """
        try:
            own = attempted(compute, DeviceLostError, OthersFailedError)
        except OthersFailedError:
            return self._failure(None)
        failure = own if isinstance(own, PassFailure) else None
        if failure and failure.out_of_memory:
            log.warning("what all workers compute together ran out of memory here")
        return self._failure(failure) if any(self.group.gather(_said_of(failure))) else own

    def _failure(self, own: PassFailure | None) -> PassFailure:
        """Return the first worker's failure of those that have failed. It is out of memory only if all of them are."""
        severest = max(self.group.gather(_said_of(own)))
        names, reasons = (self.group.texts(text) for text in ((own.error_type, own.reason) if own else ("", "")))
        first = next(rank for rank, each in enumerate(names) if each)
        return PassFailure(names[first], reasons[first], severest == _OUT_OF_MEMORY)

    def agree_to_go_on(self) -> None:
        """Before something is exchanged, when all that it needs is in memory.

        Raises OthersFailedError if not all have come here.
        """
        if any(self.group.gather(_GOES_ON)):
            raise OthersFailedError

    def all_to_all(self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int]) -> Tensor:
        """Give each worker the next of `sizes` numbers of `sent`; return what each gives, `received_sizes` numbers."""
        sent = sent.contiguous()  # one column of a matrix, made flat, still lies apart in memory
        received = sent.new_empty(sum(received_sizes))
        self.agree_to_go_on()
        self.group.all_to_all(received, sent, received_sizes, sizes)
        return received

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum of those of all workers."""
        self.agree_to_go_on()
        self.group.all_reduce(tensor)
