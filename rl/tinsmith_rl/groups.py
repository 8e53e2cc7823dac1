"""Schedules groups of episodes, each on some weights. One rule on staleness covers all schedules.

A step trains on a batch of B groups. With weights of version v (after v steps) and a limit s on staleness, groups are
started until (v + 1 + s) · B of them count.

- Synchronous, s = 0: no group of the next batch starts before the step is done.
- One step off, s = 1, groups taken in order: the next batch is played while the trainer works on this one.
- Asynchronous, any s: groups are taken as they finish.

A group is played on the newest weights at its start. If it would be older than s steps when it is trained on, it is
discarded and counted, and another one is started.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from tinsmith_rl.env import Prompt
from tinsmith_rl.policy import Policy
from tinsmith_rl.trajectory import Trajectory


@dataclass(frozen=True)
class Group:
    """Finished episodes of one prompt."""

    number: int
    """Counted over the whole run."""
    prompt: Prompt
    version: int
    """Number of training steps behind the weights that it was played on."""
    trajectories: tuple[Trajectory, ...]

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories that can be learned from."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.usable)


Replaced = Literal["stale", "without_variance"]
"""The reason why a finished group is discarded and another one played."""

Play = Callable[[int, int, Policy], Coroutine[Any, Any, Group]]
"""Plays a group: (its number, version of the weights, the policy with these weights) -> the group."""


@dataclass
class GroupStream:
    """Plays groups ahead of the trainer, and hands them over batch by batch.

    Each group is played as a task of `tasks`, so the failure of one ends the body of that task group. `accepts` decides
    whether a finished group counts (dynamic sampling); once `max_draws` groups were started for one batch, all count.
    """

    tasks: asyncio.TaskGroup
    play: Play
    batch: int
    staleness: int
    in_order: bool
    accepts: Callable[[Group], bool]
    max_draws: int
    next_number: int = 0
    """Number of the next group to start; a resumed run continues the count."""
    replaced: Counter[Replaced] = field(default_factory=Counter)
    """Groups that were discarded and replaced since this was last cleared, by reason."""

    def __post_init__(self) -> None:
        self._version = 0
        self._first_version = 0
        self._counting = 0
        """Groups that were started and not discarded."""
        self._draws = 0
        """Groups that were started since the last `publish`."""
        self._policy: Policy | None = None
        self._playing: dict[int, asyncio.Task[Group]] = {}
        self._ready: dict[int, Group] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def publish(self, version: int, policy: Policy) -> None:
        """Take new weights: groups that start from now on are played on them.

        The first call starts the first groups.
        """
        if self._policy is None:
            self._first_version = version
        self._version, self._policy = version, policy
        self._draws = 0
        self._start()

    async def take(self) -> list[Group]:
        """Wait for the next batch."""
        while True:
            self._discard_stale()
            if batch := self._batch():
                break
            self._changed.clear()
            await self._changed.wait()
        for group in batch:
            del self._ready[group.number]
        return batch

    def close(self) -> None:
        """Cancel the groups that are being played, and start no more."""
        self._closed = True
        for task in self._playing.values():
            task.cancel()

    def _batch(self) -> list[Group]:
        """The next batch if it is complete, else []."""
        numbers = sorted({*self._playing, *self._ready}) if self.in_order else list(self._ready)
        chosen = numbers[: self.batch]
        complete = len(chosen) == self.batch and all(number in self._ready for number in chosen)
        return [self._ready[number] for number in chosen] if complete else []

    def _start(self) -> None:
        assert self._policy is not None
        while (
            not self._closed
            and self._counting < (self._version - self._first_version + 1 + self.staleness) * self.batch
        ):
            number, self.next_number = self.next_number, self.next_number + 1
            self._counting += 1
            self._draws += 1
            task = self.tasks.create_task(self.play(number, self._version, self._policy))
            self._playing[number] = task
            task.add_done_callback(partial(self._finished, number))

    def _finished(self, number: int, task: "asyncio.Task[Group]") -> None:
        if task.cancelled() or task.exception() is not None:
            self._closed = True  # the task group reports the failure, and takes no new tasks
            return
        del self._playing[number]
        group = task.result()
        if self.accepts(group) or self._draws >= self.max_draws:
            self._ready[number] = group
        else:
            self._replace("without_variance")
        self._changed.set()

    def _discard_stale(self) -> None:
        for group in list(self._ready.values()):
            if group.version < self._version - self.staleness:
                del self._ready[group.number]
                self._replace("stale")

    def _replace(self, reason: Replaced) -> None:
        self.replaced[reason] += 1
        self._counting -= 1
        self._start()
