"""The boundary around one command or request: what goes wrong inside is its failure, and does not end the process.

A device that is lost passes: it is lost to every other command as well.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

from tinsmith.errors import DeviceLostError, Reported, TinsmithError

log = logging.getLogger(__name__)

T = TypeVar("T")


def failing_into(report: Callable[[TinsmithError], None], *passing: type[TinsmithError]) -> Reported:
    """Run the body; an error goes to `report`. One that is not of our family is a bug: it is logged with its traceback.

    Errors of the types `passing` are raised: they are nobody's failure. So is DeviceLostError.
    """

    def ours(error: Exception) -> None:
        if not isinstance(error, TinsmithError):
            log.error("unexpected error", exc_info=error)
            error = TinsmithError(f"internal error: {error!r}")
        report(error)

    return Reported(Exception, ours, (DeviceLostError, *passing))


def result_or_error(work: Callable[[], T]) -> T | TinsmithError:
    """Return what `work` returns, or the error that `failing_into` would report."""
    failures: list[TinsmithError] = []
    with failing_into(failures.append):
        return work()
    return failures[0]
