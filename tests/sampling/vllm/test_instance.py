"""One life of a server: whether it answers, how many sequences it runs at a time, and whose weights it has.

Whether a server answers is its engine's to say: for a moment it does not know that its engine ends.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.sampling.vllm.answering import answering, in_a_loop, instance_of
from tinsmith.sampling.vllm import instance as room
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Slots, WeightsLock


@in_a_loop
async def test_a_server_whose_engine_or_worker_ends_does_not_answer(tmp_path: Path) -> None:
    status: dict[str, int] = {}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status.get(request.path, 200))

    async with answering(tmp_path, answer) as connection:
        for status in ({}, {"/is_paused": 500}, {"/health": 503}, {"/collective_rpc": 500}):
            assert await instance_of(connection).answers() is (not status)


@pytest.mark.parametrize(("end", "seen"), [("never", "silent"), ("answer", "answers"), ("die", "lost"), ("refuse once", "answers")])
@in_a_loop
async def test_an_engine_that_is_silent_may_answer_later_or_have_ended(
    end: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only /health tells of the end; what the engine was asked before is never answered. An error of a proxy is no end."""
    monkeypatch.setattr(room, "_LOOK_AGAIN_S", 0.05)
    asked: list[str] = []
    later = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        looked = asked.count("/health")
        if request.path == "/health":
            if looked == 5 and end == "answer":
                later.set()
            return web.Response(status=503 if looked >= 5 and end == "die" else 200)
        if end == "refuse once":
            return web.Response(status=504 if looked == 0 else 200)
        await later.wait()
        return web.Response()

    async with answering(tmp_path, answer) as connection:
        assert await instance_of(connection).look(0.5 if end == "never" else 600) == seen
    assert asked.count("/health") >= {"never": 0, "refuse once": 1}.get(end, 5)


@in_a_loop
async def test_sequences_are_counted_and_those_that_wait_get_one_each_in_turn() -> None:
    slots = Slots(4)
    begun: list[tuple[str, int]] = []
    ends = {name: asyncio.Event() for name in "abcd"}

    async def hold(name: str, at_most: int) -> None:
        async with slots.reserve(at_most) as count:
            begun.append((name, count))
            await ends[name].wait()

    holding = {name: asyncio.create_task(hold(name, at_most)) for name, at_most in (("a", 3), ("b", 3), ("c", 3), ("d", 2))}
    await asyncio.sleep(0)
    assert begun == [("a", 3), ("b", 1)]
    for ending, following in (("b", ("c", 1)), ("a", ("d", 1))):
        ends[ending].set()
        await holding[ending]
        await asyncio.sleep(0)
        assert begun.pop() == following
    for event in ends.values():
        event.set()
    await asyncio.gather(*holding.values())
    assert (begun, slots.free, len(slots.queue)) == ([("a", 3), ("b", 1)], 4, 0)


@in_a_loop
async def test_who_gives_up_waiting_for_slots_takes_none_along() -> None:
    slots = Slots(4)

    async def wait() -> None:
        async with slots.reserve(1):
            raise AssertionError

    async with slots.reserve(4) as count:
        assert count == 4
        early, late = (asyncio.create_task(wait()) for _ in range(2))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.wait([early])
    late.cancel()  # it has just got one
    await asyncio.wait([late])
    assert (slots.free, len(slots.queue)) == (4, 0)


# Requests for different full weights: who runs beside whom, and who waits


class Story:
    """What happened at a lock, in order."""

    def __init__(self) -> None:
        self.lock = WeightsLock()
        self.events: list[str] = []
        self.switching_began, self.may_switch = asyncio.Event(), asyncio.Event()
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


@in_a_loop
async def test_requests_for_the_same_weights_run_together_and_others_wait() -> None:
    story = Story()
    await asyncio.gather(*(story.run(key, name) for key, name in ((BASE, "a"), ("7", "b"), (BASE, "c"), ("7", "d"))))
    assert (story.lock.running, len(story.lock.queue)) == (0, 0)
    of_seven = ["to 7", "b begins", "d begins", "b ends", "d ends"]
    assert story.events == ["a begins", "a ends", *of_seven, "to ", "c begins", "c ends"]


@in_a_loop
async def test_a_switch_that_fails_fails_one_and_the_next_switches_from_an_unknown_state() -> None:
    story = Story()

    async def broken() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        async with story.lock.holding("7", broken):
            raise AssertionError
    assert story.lock.weights == UNKNOWN
    await story.run(BASE, "a")
    assert story.events == ["to ", "a begins", "a ends"]


@in_a_loop
async def test_who_gives_up_waiting_for_weights_holds_nobody_up() -> None:
    story = Story()
    async with story.lock.holding(BASE, story.switching(BASE)):
        gives_up, follows = (asyncio.create_task(story.run(key, name)) for key, name in (("7", "b"), (BASE, "c")))
        await asyncio.sleep(0)
        gives_up.cancel()
        await follows
    await asyncio.wait([gives_up])
    assert (story.lock.weights, story.events) == (BASE, ["c begins", "c ends"])


@pytest.mark.parametrize("times", [1, 3])
@in_a_loop
async def test_a_switch_is_finished_when_who_wanted_it_gives_up(times: int) -> None:
    story = Story()
    story.may_switch.clear()
    first = asyncio.create_task(story.run("7", "a"))
    await story.switching_began.wait()
    for _ in range(times):
        first.cancel()
        await asyncio.sleep(0)
    story.may_switch.set()
    await asyncio.gather(first, story.run("7", "b"), return_exceptions=True)
    assert first.cancelled()
    assert story.events == ["to 7", "b begins", "b ends"]
