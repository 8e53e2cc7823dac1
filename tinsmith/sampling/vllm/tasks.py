"""Work that several coroutines wait for together."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable, MutableMapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def once(tasks: "MutableMapping[K, asyncio.Task[T]]", key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Future[T]":
    """The result of work that all who need this key share. It goes on if they give up; if it fails, who comes next tries again."""
    task = tasks.get(key)
    if task is None:
        task = tasks[key] = asyncio.create_task(work())
        task.add_done_callback(partial(_forget_failure, tasks, key))
    return asyncio.shield(task)


def _forget_failure(tasks: "MutableMapping[K, asyncio.Task[T]]", key: K, task: "asyncio.Task[T]") -> None:
    if (task.cancelled() or task.exception() is not None) and tasks.get(key) is task:
        del tasks[key]


async def whole(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that must not stop half-way: who gives up waits for its end first."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # it may be told more than once
                await asyncio.wait([task])
        raise


async def together(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order. The first error ends the others, which is waited for."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
