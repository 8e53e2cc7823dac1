"""Which groups of episodes are played when. One rule on staleness makes all schedules.

A step trains on a batch of B groups. With weights of version v (v steps done) and a staleness bound s, groups are started until
(v + 1 + s) · B of them count. So with s = 0 nothing of the next batch begins before the step is done: synchronous. With s = 1, taken in
order, the next batch is played while the trainer works on this one: one step off. Taken as they finish, with any s: asynchronous.
A group is played on the weights that were newest when it began; one that would be older than s steps when it is trained on is discarded,
counted, and another one started.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from tinsmith.rl.env import Prompt
from tinsmith.rl.policy import Policy
from tinsmith.rl.trajectory import Trajectory


@dataclass(frozen=True)
class Group:
    """Finished episodes of one prompt."""

    number: int
    """Counts all groups of a run."""
    prompt: Prompt
    version: int
    """Steps that the weights had seen when the group began."""
    trajectories: tuple[Trajectory, ...]

    @property
    def usable(self) -> tuple[Trajectory, ...]:
        """The trajectories that something can be learnt from."""
        return tuple(trajectory for trajectory in self.trajectories if trajectory.usable)


@dataclass
class Counts:
    """Groups since the last batch was taken."""

    without_variance: int = 0
    """Discarded by dynamic sampling."""
    stale: int = 0


Play = Callable[[int, int, Policy], Awaitable[Group]]
"""Plays group `number` on weights `version`."""


@dataclass
class GroupStream:
    """Groups for the trainer, batch after batch.

    `wanted` decides whether a finished group counts (dynamic sampling); after `most_draws` groups for one batch all do.
    """

    play: Play
    batch: int
    staleness: int
    in_order: bool
    wanted: Callable[[Group], bool]
    most_draws: int
    next_number: int = 0
    """Number of the next group to start; a resumed run goes on counting."""
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._version = 0
        self._first_version = 0
        self._started = 0
        """Groups that count: started and not discarded."""
        self._taken_draws = 0
        self._policy: Policy | None = None
        self._live: dict[int, asyncio.Task[Group]] = {}
        self._ready: dict[int, Group] = {}
        self._news = asyncio.Event()

    def publish(self, version: int, policy: Policy) -> None:
        """New weights: groups that begin from now on are played on them. The first call begins the stream."""
        if self._policy is None:
            self._first_version = version
        self._version, self._policy = version, policy
        self._taken_draws = 0
        self._start()

    async def take(self) -> list[Group]:
        """The next batch. Raises what playing a group raised."""
        while True:
            for task in [task for task in self._live.values() if task.done()]:
                task.result()  # a task that is done and still here has failed
            self._discard_stale()
            if batch := self._batch():
                break
            self._news.clear()
            await self._news.wait()
        for group in batch:
            del self._ready[group.number]
        return batch

    async def close(self) -> None:
        """Stop what is being played."""
        tasks = list(self._live.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _batch(self) -> list[Group]:
        numbers = sorted({*self._live, *self._ready}) if self.in_order else list(self._ready)
        chosen = numbers[: self.batch]
        complete = len(chosen) == self.batch and all(number in self._ready for number in chosen)
        return [self._ready[number] for number in chosen] if complete else []

    def _start(self) -> None:
        assert self._policy is not None
        while self._started < (self._version - self._first_version + 1 + self.staleness) * self.batch:
            number, self.next_number = self.next_number, self.next_number + 1
            self._started += 1
            self._taken_draws += 1
            task = asyncio.ensure_future(self.play(number, self._version, self._policy))
            self._live[number] = task
            task.add_done_callback(partial(self._finished, number))

    def _finished(self, number: int, task: "asyncio.Task[Group]") -> None:
        self._news.set()
        if task.cancelled() or task.exception() is not None:
            return  # left among the live ones, where `take` finds it
        del self._live[number]
        group = task.result()
        if self.wanted(group) or self._taken_draws >= self.most_draws:
            self._ready[number] = group
        else:
            self.counts.without_variance += 1
            self._replace()

    def _discard_stale(self) -> None:
        for group in list(self._ready.values()):
            if group.version < self._version - self.staleness:
                del self._ready[group.number]
                self.counts.stale += 1
                self._replace()

    def _replace(self) -> None:
        self._started -= 1
        self._start()
