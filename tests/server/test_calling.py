"""Calls of the hub from another process, here over a socket within one.

Invariant: A call across processes gives what it gives within one: the result, or the same error.
"""

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.server.serving import Served
from tinsmith.errors import BackpressureError, NotFoundError, TinsmithError
from tinsmith.server import calls
from tinsmith.server.calling import HubAnswers, HubAtDistance
from tinsmith.server.hub import Hub
from tinsmith.wire.inspection import LimitError, RequestKey


@asynccontextmanager
async def at_distance(hub: Hub) -> AsyncIterator[tuple[HubAtDistance, HubAnswers]]:
    """The hub behind a socket, which passes on few kilobytes at a time."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ask, answering = HubAtDistance(), HubAnswers(hub)
    await ask.connect(ours)
    await answering.connect(theirs)
    yield ask, answering
    answering.close()
    await ask.lost.wait()


async def after(hub: Hub, seconds: float, content: bytes) -> tuple[bytes, int]:
    """The content, later, and how many base models there are."""
    await asyncio.sleep(seconds)
    return content, len(hub.base_models.names)


async def refuse(hub: Hub, error: Exception) -> None:
    raise error


async def test_results_come_whole_and_as_they_are_ready(server: Served) -> None:
    contents = [os.urandom(size) for size in (3_000_000, 0, 1, 70_000, 5, 12, 65_536)]
    async with at_distance(server.hub) as (ask, answering):
        assert not answering.heard
        slow = asyncio.create_task(ask(after, 60.0, b""))
        fast = [ask(after, 0.0, content) for content in contents * 20]
        assert await asyncio.gather(*fast) == [(content, 1) for content in contents * 20]
        assert answering.heard
        assert not slow.done()
        slow.cancel()


def every_error(kind: type[TinsmithError] = TinsmithError) -> Iterator[type[TinsmithError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from every_error(below)


async def test_errors_of_every_class_come_as_they_are(server: Served) -> None:
    """With all their words: one whose middle was left out already loses no more."""
    async with at_distance(server.hub) as (ask, _):
        for kind in set(every_error()):
            error = LimitError("m" * 5000, RequestKey("a", 3)) if kind is LimitError else kind("m" * 5000)
            with pytest.raises(kind) as raised:
                await ask(refuse, error)
            assert type(raised.value) is kind
            assert str(raised.value) == str(error)
            assert vars(raised.value) == vars(error)


async def test_errors_are_those_of_the_hub(server: Served, caplog: pytest.LogCaptureFixture) -> None:
    async with at_distance(server.hub) as (ask, _):
        with pytest.raises(BackpressureError, match="over the limit") as refused:
            await ask(refuse, BackpressureError("over the limit", 17.0))
        assert refused.value.retry_after_s == 17.0
        with pytest.raises(NotFoundError, match="not here"):
            await ask(refuse, NotFoundError("not here"))
        with caplog.at_level(logging.ERROR), pytest.raises(TinsmithError, match=r"internal error .* KeyError"):
            await ask(refuse, KeyError("a fault of ours"))
        assert "a fault of ours" in caplog.text
        assert await ask(after, 0.0, b"more") == (b"more", 1)


async def begin_later(hub: Hub) -> None:
    await asyncio.sleep(0.1)
    hub.lifetimes.began("late")


async def test_nothing_waits_on_for_an_http_server_that_has_ended(server: Served) -> None:
    """What it only waited for is given up, so that no result is taken for fetched; what it has begun is done."""
    body = {"model_id": await server.new_model(), "seq_id": 5, "adam_params": {}}
    request_id = (await server.answer("optim_step", body))["request_id"]
    before = asyncio.all_tasks()
    async with at_distance(server.hub) as (ask, _):
        known = await ask(calls.base_models_beside, None)
        waits = ask(calls.until_stop), ask(calls.base_models_beside, known), ask(calls.wait_for, request_id)
        asked = [asyncio.create_task(each) for each in (*waits, ask(begin_later))]
        await ask(after, 0.0, b"")
        assert server.hub.waiters.count == 1
    for each in asked:
        each.cancel()
    _, going_on = await asyncio.wait(asyncio.all_tasks() - before, timeout=10)
    assert not going_on
    assert server.hub.waiters.count == 0
    assert await server.hub.lifetimes.is_open("late")
