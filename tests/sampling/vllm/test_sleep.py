"""Servers that sleep together while the trainer has their GPU: real processes on real sockets, which only say that they
live."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sampling.vllm.answering import in_a_loop
from tests.sampling.vllm.test_servers import HUNG_S, STUB, TryOut, launch_of, ready, supervised
from tinsmith.sampling.vllm import servers as room
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.protocol import ServerLostError
from tinsmith.sampling.vllm.servers import Server

SLEEPS = [*STUB, "--sleeps"]


@asynccontextmanager
async def starting(
    directory: Path, command: list[str], hung_s: float = 600, try_out: TryOut | None = None
) -> AsyncIterator[Server]:
    async with (
        asyncio.timeout(600),
        supervised(launch_of(directory, command), hung_s=hung_s, try_out=try_out) as servers,
    ):
        yield servers.all[0]


@in_a_loop
async def test_what_keeps_a_server_awake_ends_first_what_comes_later_waits_and_nothing_is_taken_for_known(
    tmp_path: Path,
) -> None:
    """A server goes on as soon as it is awake itself, and others may need long: what was compared is forgotten before
    the slowest wakes."""
    async with starting(tmp_path, SLEEPS) as server:
        sleep_mode, instance, done = server.sleep_mode, await ready(server), list[str]()
        instance.images["known"] = 1
        instance.checks["weights"] = asyncio.create_task(asyncio.sleep(0))

        async def told() -> Any:
            return await instance.connection.get("/switches")

        async def used() -> None:
            async with sleep_mode.kept_awake():
                done.append("later")

        async with sleep_mode.kept_awake():
            falling = asyncio.create_task(sleep_mode.fall_asleep())
            await asyncio.sleep(0)
            later, waiting = asyncio.create_task(used()), asyncio.create_task(sleep_mode.until_awake())
            await asyncio.wait([falling], timeout=0.1)
            assert await told() == []
        await falling
        assert await told() == ["/sleep?level=1&mode=keep"]
        await asyncio.wait([later, waiting], timeout=0.1)
        assert (done, waiting.done(), len(instance.images), len(instance.checks)) == ([], False, 1, 1)
        await instance.connection.get("/busy?for_s=3600")
        waking = asyncio.create_task(sleep_mode.wake_up())
        while "/wake_up" not in await told():
            await asyncio.wait([waking], timeout=0.01)
        assert (instance.checks, waking.done()) == ({}, False)
        await instance.connection.get("/busy?for_s=0")  # from now on it answers again
        await asyncio.gather(waking, later, waiting)
        assert await told() == ["/sleep?level=1&mode=keep", "/wake_up"]
        assert (done, len(instance.images), instance.checks) == (["later"], 0, {})


@in_a_loop
async def test_a_server_that_does_not_obey_is_ended_and_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends before the trainer has the GPU, and starts when it may. The stub knows no sleep, and answers 404."""
    async with starting(tmp_path, STUB) as server:
        sleep_mode, instance = server.sleep_mode, await ready(server)
        await sleep_mode.fall_asleep()
        assert server.process is not None
        assert server.process.returncode is not None
        await asyncio.sleep(0.1)
        assert sleep_mode.instances == set(), "no other has started meanwhile"
        await sleep_mode.wake_up()
        assert await (await ready(server, after=instance)).answers()
    assert "is ended, because it does not fall asleep, or wake" in caplog.text


@pytest.mark.parametrize("dies", ["before it sleeps", "asleep"])
@in_a_loop
async def test_a_server_that_dies_while_it_is_tried_out_lets_nobody_wait_for_ever(tmp_path: Path, dies: str) -> None:
    """What tries it out waits until it is awake, and so must not be waited for."""
    begun, sleeps = asyncio.Event(), asyncio.Event()

    async def try_out(instance: Instance) -> None:
        begun.set()
        await sleeps.wait()
        await instance.sleep_mode.until_awake()
        await instance.connection.get("/health")

    async with starting(tmp_path, SLEEPS, try_out=try_out) as server:
        await begun.wait()
        first: Any = server.process
        if dies == "before it sleeps":
            first.kill()
        falling = asyncio.create_task(server.sleep_mode.fall_asleep())
        await asyncio.sleep(0)
        sleeps.set()
        await falling
        if dies == "asleep":
            first.kill()
            await first.wait()
        await server.sleep_mode.wake_up()
        await ready(server)
        assert server.process is not first


@in_a_loop
async def test_a_server_that_hangs_keeps_the_trainer_waiting_as_long_as_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loading an adapter that nobody samples yet, which keeps it awake."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)
    async with starting(tmp_path, SLEEPS, HUNG_S) as server:
        instance = await ready(server)
        assert server.process is not None
        async with server.sleep_mode.kept_awake():
            server.process.send_signal(signal.SIGSTOP)
            falling = asyncio.create_task(server.sleep_mode.fall_asleep())
            with pytest.raises(ServerLostError):
                await instance.connection.post("/v1/load_lora_adapter")
        await falling
        assert server.sleep_mode.instances == set()
