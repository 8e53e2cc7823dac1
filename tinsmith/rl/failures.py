"""Failures of environments: the first is shown whole, the others are counted, and too many end the run.

A few failed episodes are dropped without harm. If most fail, the rewards say nothing about the model, and training on them is useless.
"""

import logging
from collections.abc import Sequence

from tinsmith.errors import TinsmithError
from tinsmith.rl.trajectory import Trajectory

log = logging.getLogger(__name__)

ENOUGH = 64
"""Episodes that a run has to see before it judges their share, so that two of a small batch do not end it."""


class TooManyFailuresError(TinsmithError):
    """An environment fails so often that going on is of no use."""


class Failures:
    """Counts the episodes that an environment ended by raising, by a wrong return value or by taking too long.

    `max_share` is the largest share of failed episodes that is accepted. `max_groups` groups in a row in which every episode failed end the
    run.
    """

    def __init__(self, env: str, max_share: float, max_groups: int) -> None:
        self.env, self.max_share, self.max_groups = env, max_share, max_groups
        self.failed = 0
        """Of the whole run."""
        self._first = ""
        self._groups_in_a_row = 0
        self._judged = self._judged_failed = self._reported = 0

    def count(self, group: Sequence[Trajectory]) -> None:
        """Count the episodes of a group. Raises TooManyFailuresError after `max_groups` groups in a row in which every episode failed."""
        failed = [trajectory for trajectory in group if trajectory.failed]
        if failed and not self._first:
            self._first = failed[0].error
            log.error("environment %r failed in an episode (%s):\n%s", self.env, failed[0].stop_reason, failed[0].details.rstrip())
        self.failed += len(failed)
        self._judged += len(group)
        self._judged_failed += len(failed)
        self._groups_in_a_row = self._groups_in_a_row + 1 if len(failed) == len(group) else 0
        if self._groups_in_a_row >= self.max_groups:
            raise self._too_many(f"in every episode of {self._groups_in_a_row} groups in a row", "max_failed_groups", self.max_groups)

    def judge(self, enough: int = ENOUGH) -> None:
        """Log the failures since the last call, and check their share once `enough` episodes have been counted.

        Raises TooManyFailuresError if the share is too large.
        """
        if self.failed > self._reported:
            log.warning("environment %r failed in %d more episodes, %d in all", self.env, self.failed - self._reported, self.failed)
            self._reported = self.failed
        if self._judged < enough:
            return
        if self._judged_failed > self.max_share * self._judged:
            raise self._too_many(f"in {self._judged_failed} of {self._judged} episodes", "max_failed_share", self.max_share)
        self._judged = self._judged_failed = 0

    def _too_many(self, how_often: str, setting: str, limit: float) -> TooManyFailuresError:
        remedy = f"repair it, or raise env: {setting}={limit:g}"
        return TooManyFailuresError(f"environment {self.env!r} failed {how_often}; {remedy}; the first failure was {self._first}")
