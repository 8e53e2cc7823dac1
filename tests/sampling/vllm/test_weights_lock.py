"""Requests for different full weights of one server: who runs beside whom, and who waits."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, WeightsLock


class Story:
    """What happened at a lock, in order."""

    def __init__(self) -> None:
        self.lock = WeightsLock()
        self.events: list[str] = []
        self.switching_began = asyncio.Event()
        self.may_switch = asyncio.Event()
        """Switches wait for it."""
        self.may_switch.set()

    async def run(self, key: str, name: str) -> None:
        async with self.lock.holding(key, self.switching(key)):
            self.events.append(f"{name} begins")
            assert self.lock.weights == key
            await asyncio.sleep(0)
            self.events.append(f"{name} ends")

    def switching(self, key: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def switch() -> None:
            assert self.lock.running == 1
            self.events.append(f"to {key}")
            self.switching_began.set()
            await self.may_switch.wait()

        return switch


def test_requests_for_the_same_weights_run_together_and_others_wait() -> None:
    async def tell() -> list[str]:
        story = Story()
        await asyncio.gather(*(story.run(key, name) for key, name in ((BASE, "a"), ("7", "b"), (BASE, "c"), ("7", "d"))))
        assert (story.lock.running, len(story.lock.queue)) == (0, 0)
        return story.events

    assert asyncio.run(tell()) == [
        *("a begins", "a ends", "to 7", "b begins", "d begins", "b ends", "d ends"),
        *("to ", "c begins", "c ends"),
    ]


def test_a_switch_that_fails_fails_one_and_the_next_switches_again() -> None:
    async def tell() -> list[str]:
        story = Story()

        async def broken() -> None:
            raise OSError("no")

        async def fails() -> None:
            with pytest.raises(OSError, match="no"):
                async with story.lock.holding("7", broken):
                    raise AssertionError
            story.events.append("failed")

        await asyncio.gather(fails(), story.run(BASE, "a"))
        return story.events

    assert asyncio.run(tell()) == ["failed", "to ", "a begins", "a ends"]


def test_who_gives_up_waiting_holds_nobody_up() -> None:
    async def tell() -> list[str]:
        story = Story()
        done = asyncio.Event()

        async def stay() -> None:
            async with story.lock.holding(BASE, story.switching(BASE)):
                await done.wait()
            story.events.append("the first leaves")

        first = asyncio.create_task(stay())
        await asyncio.sleep(0)
        second = asyncio.create_task(story.run("7", "b"))
        third = asyncio.create_task(story.run(BASE, "c"))
        await asyncio.sleep(0)
        second.cancel()
        await third
        done.set()
        await asyncio.gather(first, second, return_exceptions=True)
        assert story.lock.weights == BASE
        return story.events

    assert asyncio.run(tell()) == ["c begins", "c ends", "the first leaves"]


def test_an_unknown_state_is_left_by_a_switch() -> None:
    async def tell() -> list[str]:
        story = Story()
        story.lock.weights = UNKNOWN
        await story.run(BASE, "a")
        return story.events

    assert asyncio.run(tell()) == ["to ", "a begins", "a ends"]


@pytest.mark.parametrize("times", [1, 3])
def test_a_switch_is_finished_when_who_wanted_it_gives_up(times: int) -> None:
    async def tell() -> list[str]:
        story = Story()
        story.may_switch.clear()
        first = asyncio.create_task(story.run("7", "a"))
        await story.switching_began.wait()
        assert story.events == ["to 7"]
        for _ in range(times):
            first.cancel()
            await asyncio.sleep(0)
        story.may_switch.set()
        second = asyncio.create_task(story.run("7", "b"))
        await asyncio.gather(first, second, return_exceptions=True)
        assert first.cancelled()
        return story.events

    assert asyncio.run(tell()) == ["to 7", "b begins", "b ends"]
