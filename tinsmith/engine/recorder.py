"""Records the outcomes of operations in the log, then tells the server.

An outcome that the database does not take is kept in memory and tried again until it does. It is never replaced by a failure: the
operation has had its effect, and a client that repeats a step applies it twice.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinsmith.errors import StoreUnavailableError
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

FIRST_S = 0.1
LONGEST_S = 5.0
"""Intervals double between these two, in seconds."""


class Backoff:
    """The next attempt at one thing that goes well again by itself: soon at first, then at growing intervals."""

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._due_at = 0.0

    @property
    def is_failing(self) -> bool:
        return self._interval_s > 0

    @property
    def wait_s(self) -> float:
        return max(0.0, self._due_at - time.monotonic())

    def failed(self) -> None:
        self._interval_s = min(LONGEST_S, 2 * self._interval_s or FIRST_S)
        self._due_at = time.monotonic() + self._interval_s

    def succeeded(self) -> None:
        self._interval_s = self._due_at = 0.0


@dataclass(eq=False)
class Recorder:
    """Outcomes on their way to the log. `tell` gets each one that is there, for the server.

    Over `limit_bytes` of results that the database has not taken, `is_full` asks for no more.
    """

    store: Store
    tell: Callable[[Outcome], None]
    limit_bytes: float
    waiting: list[Outcome] = field(default_factory=list)
    """Outcomes that are not in the log, oldest first."""
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more work should be started."""
        held = sum(len(outcome.result or b"") + len(outcome.error or "") for outcome in self.waiting)
        return bool(self.waiting) and held >= self.limit_bytes

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Record outcomes behind those that wait, now or later. Raises nothing that the database raises."""
        was_full = self.is_full
        self.waiting += outcomes
        self.flush()
        if self.is_full and not was_full:
            log.error("training waits until the database takes results: it is to take %d (--max-unrecorded-mib)", len(self.waiting))

    def flush(self) -> None:
        """Record what waits, if the next attempt is due."""
        if not self.waiting or self.backoff.wait_s > 0:
            return
        left = self._left_over(self.waiting)
        waiting = {outcome.request_id for outcome in left}
        recorded = [outcome for outcome in self.waiting if outcome.request_id not in waiting]
        self.waiting = left
        if left:
            self.backoff.failed()
        elif self.backoff.is_failing:
            self.backoff.succeeded()
            log.info("the database has taken %d outcomes that waited for it", len(recorded))
        for outcome in recorded:
            self.tell(outcome)

    def _left_over(self, outcomes: list[Outcome]) -> list[Outcome]:
        """Record outcomes in one transaction, or each alone if one of them cannot be; returns those that are not in the log."""
        try:
            self.store.record(outcomes)
        except StoreUnavailableError as error:
            log.warning("%d outcomes wait for the database: %s", len(outcomes), error)
            return outcomes
        except Exception:
            if len(outcomes) > 1:
                return [outcome for single in outcomes for outcome in self._left_over([single])]
            log.exception("the outcome of %s cannot be recorded; it is tried again", outcomes[0].request_id)
            return outcomes
        return []
