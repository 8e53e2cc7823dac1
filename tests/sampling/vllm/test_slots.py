"""How many sequences run at a time, and who comes next."""

import asyncio
from collections.abc import Awaitable, Callable

from tinsmith.sampling.vllm.instance import Slots


def told(story: Callable[[Slots], Awaitable[None]], count: int = 4) -> None:
    """Tell a story to so many slots, which are all free in the end."""

    async def tell() -> None:
        slots = Slots(count)
        await story(slots)
        assert (slots.free, len(slots.queue)) == (count, 0)

    asyncio.run(tell())


def test_sequences_are_counted_and_those_that_wait_get_one_each_in_turn() -> None:
    async def story(slots: Slots) -> None:
        begun: list[tuple[str, int]] = []
        ends = {name: asyncio.Event() for name in "abcd"}

        async def hold(name: str, at_most: int) -> None:
            async with slots.reserve(at_most) as count:
                begun.append((name, count))
                await ends[name].wait()

        async with asyncio.TaskGroup() as group:
            holding = [group.create_task(hold(name, at_most)) for name, at_most in (("a", 3), ("b", 3), ("c", 3), ("d", 2))]
            await asyncio.sleep(0)
            assert begun == [("a", 3), ("b", 1)]
            ends["b"].set()
            await holding[1]
            await asyncio.sleep(0)
            assert begun[2:] == [("c", 1)]
            ends["a"].set()
            await holding[0]
            await asyncio.sleep(0)
            assert begun[3:] == [("d", 1)]
            for event in ends.values():
                event.set()

    told(story)


def test_who_gives_up_waiting_takes_none_along() -> None:
    async def story(slots: Slots) -> None:
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

    told(story)
