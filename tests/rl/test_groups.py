"""Which groups are played on which weights, in every mode; what dynamic sampling and the limit on staleness replace."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec

import pytest

from tests.rl.scripted import Scripted
from tinsmith_rl.env import Prompt
from tinsmith_rl.groups import Group, GroupStream, Play
from tinsmith_rl.policy import Policy
from tinsmith_rl.rollouts import task_group

P = ParamSpec("P")
NOBODY = Scripted([])


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test."""

    @wraps(test)
    def run(*arguments: P.args, **named: P.kwargs) -> None:
        asyncio.run(test(*arguments, **named))

    return run


@dataclass
class Stage:
    """Finishes groups when it is told to, and remembers on which weights each began."""

    begun: dict[int, int] = field(default_factory=dict)
    curtains: dict[int, asyncio.Event] = field(default_factory=dict)

    async def play(self, number: int, version: int, policy: Policy) -> Group:
        self.begun[number] = version
        self.curtains[number] = asyncio.Event()
        await self.curtains[number].wait()
        return Group(number, Prompt(number), version, ())

    async def finish(self, *numbers: int) -> None:
        await asyncio.sleep(0)
        for number in numbers:
            self.curtains[number].set()
        for _ in range(4):
            await asyncio.sleep(0)


@asynccontextmanager
async def stream_of(play: Play, staleness: int, in_order: bool, **more: Any) -> AsyncIterator[GroupStream]:
    """Batches of two groups. Closed as the trainer closes it."""
    usual: dict[str, Any] = {"accepts": lambda _: True, "max_draws": 100, "next_number": 0}
    async with task_group() as tasks:
        stream = GroupStream(tasks, play, batch=2, staleness=staleness, in_order=in_order, **usual | more)
        try:
            yield stream
        finally:
            stream.close()


async def taken(stream: GroupStream) -> list[int]:
    """The numbers of the next batch."""
    return [group.number for group in await stream.take()]


@in_a_loop
async def test_synchronous_groups_begin_on_the_step_s_own_weights() -> None:
    """A resumed stream counts on."""
    for first in (0, 14):
        stage = Stage()
        async with stream_of(stage.play, 0, in_order=True, next_number=first) as stream:
            for version in range(3):
                stream.publish(version, NOBODY)
                number = first + 2 * version
                await stage.finish(number + 1, number)
                assert await taken(stream) == [number, number + 1]
            assert stage.begun == {first + n: n // 2 for n in range(6)}


@in_a_loop
async def test_one_step_off_plays_the_next_batch_while_this_one_is_learnt() -> None:
    stage = Stage()
    async with stream_of(stage.play, 1, in_order=True) as stream:
        stream.publish(0, NOBODY)
        await stage.finish(0, 1, 3)
        assert stage.begun == {0: 0, 1: 0, 2: 0, 3: 0}
        assert await taken(stream) == [0, 1]
        stream.publish(1, NOBODY)
        await stage.finish(2)
        assert stage.begun == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}
        assert await taken(stream) == [2, 3]


@in_a_loop
async def test_asynchronous_groups_are_taken_as_they_finish_and_never_too_old() -> None:
    stage = Stage()
    async with stream_of(stage.play, 1, in_order=False) as stream:
        stream.publish(0, NOBODY)
        await stage.finish(3, 1)
        assert await taken(stream) == [3, 1]
        stream.publish(1, NOBODY)
        await stage.finish(4, 5)
        assert await taken(stream) == [4, 5]
        stream.publish(2, NOBODY)  # 0 and 2 began on weights 0
        await stage.finish(0, 2, 6)
        waiting = asyncio.ensure_future(taken(stream))
        await stage.finish(7)
        assert await waiting == [6, 7]
        assert stream.replaced["stale"] == 2
        await asyncio.sleep(0)
        assert stage.begun == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, 9: 2}


@in_a_loop
async def test_dynamic_sampling_replaces_groups_until_its_limit() -> None:
    stage = Stage()
    async with stream_of(stage.play, 0, in_order=True, accepts=lambda group: group.number == 1, max_draws=4) as stream:
        stream.publish(0, NOBODY)
        await stage.finish(0, 1)
        assert stage.begun == {0: 0, 1: 0, 2: 0}
        await stage.finish(2)
        await stage.finish(3)
        assert await taken(stream) == [1, 3]  # 3 is the fourth group of this batch: it counts whatever it is
        assert stream.replaced["without_variance"] == 2
        stream.publish(1, NOBODY)
        await stage.finish()
        assert stage.begun == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1}


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("turns", [(0, 4), (4, 0)], ids=["while it waits", "before it is asked"])
def test_what_playing_raises_ends_the_run(in_order: bool, turns: tuple[int, int]) -> None:
    async def pause(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def fails(number: int, version: int, policy: Policy) -> Group:
        await pause(turns[0])
        raise RuntimeError(f"group {number}")

    @in_a_loop
    async def run() -> None:
        async with stream_of(fails, 0, in_order) as stream:
            stream.publish(0, NOBODY)
            await pause(turns[1])
            await stream.take()

    with pytest.raises(RuntimeError, match="group 0"):
        run()


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_stream_starts_no_groups(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Group 0 would be replaced, but it finishes only when the stream is closed, or when group 1 fails."""
    begun: list[int] = []

    async def play(number: int, version: int, policy: Policy) -> Group:
        begun.append(number)
        if fails and number == 1:
            raise RuntimeError("group 1")
        with suppress(asyncio.CancelledError):  # it finishes at that moment
            await asyncio.Event().wait()
        return Group(number, Prompt(number), version, ())

    @in_a_loop
    async def run() -> None:
        async with stream_of(play, 0, in_order=True, accepts=lambda _: False) as stream:
            stream.publish(0, NOBODY)
            await asyncio.sleep(0)
            if fails:
                await stream.take()

    with pytest.raises(RuntimeError, match="group 1") if fails else nullcontext():
        run()
    assert begun == [0, 1]
    assert not caplog.records
