"""The boundary around one command or one request: whatever goes wrong inside becomes that one's failure and does not end the process."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tinsmith.errors import TinsmithError

log = logging.getLogger(__name__)


@contextmanager
def failing_into(report: Callable[[TinsmithError], None]) -> Iterator[None]:
    """Run the body; an error goes to `report`. One that is not of our family is a bug: it is logged with its traceback."""
    try:
        yield
    except TinsmithError as error:
        report(error)
    except Exception as error:
        log.exception("unexpected error")
        report(TinsmithError(f"internal error: {error!r}"))
