"""Servers that sleep together while the trainer has their GPU: real processes on real sockets, which only say that they live."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.preloaded import REAL_PYTHON
from tests.sampling.vllm import stub_server
from tests.sampling.vllm.test_servers import HUNG_S, ready
from tinsmith.sampling.vllm import servers as room
from tinsmith.sampling.vllm.connection import ServerLostError
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.nap import Nap
from tinsmith.sampling.vllm.servers import Launch, Server, Servers

SLEEPS = """
from aiohttp import web
from tests.sampling.vllm.stub_server import ask_workers, live
import asyncio, os, sys

async def switch(request):
    with open(sys.argv[-1] + ".asked", "a") as file:
        file.write(request.path_qs + "\\n")
    while os.path.exists(sys.argv[-1] + ".held"):
        await asyncio.sleep(0.01)
    return web.Response()

os.setpgrp()
app = web.Application()
app.add_routes([web.get("/health", live), web.get("/is_paused", live), web.post("/collective_rpc", ask_workers)])
app.add_routes([web.post("/sleep", switch), web.post("/wake_up", switch)])
web.run_app(app, path=sys.argv[-1], print=None)
"""


def with_server(
    directory: Path,
    command: list[str],
    story: Callable[[Server, Nap], Awaitable[None]],
    try_out: Callable[[Instance], Awaitable[None]] | None = None,
    hung_s: float = 600,
) -> None:
    """Tell the story to a server that is ready, or with `try_out` to one that starts."""

    async def tell() -> None:
        changed, nap = asyncio.Condition(), Nap()
        source = Launch(command, os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, directory, "stub", directory / "log", "file")
        servers = Servers([Server(source, 8, hung_s, changed, try_out, nap)], changed)
        try:
            async with asyncio.timeout(600):
                if try_out is None:
                    await ready(servers.all[0])
                await story(servers.all[0], nap)
        finally:
            for task in servers.tasks:
                task.cancel()
            await asyncio.gather(*servers.tasks, return_exceptions=True)

    asyncio.run(tell())


def asked_of(instance: Instance) -> str:
    """What it was told."""
    file = Path(instance.connection.url.removeprefix("unix:") + ".asked")
    return file.read_text() if file.exists() else ""


def hold_answers(instance: Instance) -> None:
    """Let it answer nothing that it is told, until `let_answers_go`."""
    Path(instance.connection.url.removeprefix("unix:") + ".held").touch()


def let_answers_go(instance: Instance) -> None:
    """Let it answer."""
    Path(instance.connection.url.removeprefix("unix:") + ".held").unlink()


def test_what_keeps_a_server_awake_ends_first_and_what_comes_later_waits(tmp_path: Path) -> None:
    async def story(server: Server, nap: Nap) -> None:
        assert server.instance is not None
        instance = server.instance
        server.instance.pictures["known"] = 1
        server.instance.checks["weights"] = asyncio.create_task(asyncio.sleep(0))
        done: list[str] = []

        async def used(name: str) -> None:
            async with nap.kept_awake():
                done.append(name)

        async with nap.kept_awake():
            falling = asyncio.create_task(nap.fall_asleep())
            await asyncio.sleep(0)
            later, waiting = asyncio.create_task(used("later")), asyncio.create_task(nap.until_awake())
            await asyncio.wait([falling], timeout=0.1)
            assert asked_of(instance) == ""
        await falling
        assert asked_of(instance) == "/sleep?level=1&mode=keep\n"
        await asyncio.wait([later, waiting], timeout=0.1)
        assert (done, waiting.done()) == ([], False)
        assert server.instance.pictures
        await nap.wake_up()
        await asyncio.gather(later, waiting)
        assert asked_of(instance) == "/sleep?level=1&mode=keep\n/wake_up\n"
        assert done == ["later"]
        assert (len(server.instance.pictures), server.instance.checks) == (0, {}), (
            "it has forgotten pictures, and nothing is taken for compared"
        )

    with_server(tmp_path, [REAL_PYTHON, "-c", SLEEPS], story)


def test_a_server_that_does_not_obey_is_ended_before_the_trainer_has_the_gpu_and_starts_again_when_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stub knows no sleep, and answers 404."""

    async def story(server: Server, nap: Nap) -> None:
        instance = server.instance
        assert instance is not None
        await nap.fall_asleep()
        assert server.process is not None
        assert server.process.returncode is not None
        await asyncio.sleep(0.1)
        assert nap.instances == set(), "no other has started meanwhile"
        await nap.wake_up()
        assert await (await ready(server, after=instance)).answers()

    with_server(tmp_path, [REAL_PYTHON, str(stub_server.__file__)], story)
    assert "is ended, because it does not fall asleep, or wake" in caplog.text


@pytest.mark.parametrize("dies", ["before it sleeps", "asleep"])
def test_a_server_that_dies_while_it_is_tried_out_lets_nobody_wait_for_ever(tmp_path: Path, dies: str) -> None:
    """What tries it out waits until it is awake, and so must not be waited for."""
    begun, sleeps = asyncio.Event(), asyncio.Event()

    async def try_out(instance: Instance) -> None:
        begun.set()
        await sleeps.wait()
        await instance.nap.until_awake()
        await instance.connection.get("/health")

    async def story(server: Server, nap: Nap) -> None:
        await begun.wait()
        first = server.process
        assert first is not None
        if dies == "before it sleeps":
            first.kill()
        falling = asyncio.create_task(nap.fall_asleep())
        await asyncio.sleep(0)
        sleeps.set()
        await falling
        if dies == "asleep":
            first.kill()
            await first.wait()
        await nap.wake_up()
        assert await (await ready(server)).answers()
        assert server.process is not first

    with_server(tmp_path, [REAL_PYTHON, "-c", SLEEPS], story, try_out)


def test_a_server_that_hangs_with_what_keeps_it_awake_lets_the_trainer_wait_no_longer_than_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loading an adapter that nobody samples yet."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)

    async def story(server: Server, nap: Nap) -> None:
        assert server.process is not None
        assert server.instance is not None
        async with nap.kept_awake():
            server.process.send_signal(signal.SIGSTOP)
            falling = asyncio.create_task(nap.fall_asleep())
            with pytest.raises(ServerLostError):
                await server.instance.connection.post("/v1/load_lora_adapter")
        await falling
        assert nap.instances == set()

    with_server(tmp_path, [REAL_PYTHON, "-c", SLEEPS], story, hung_s=HUNG_S)


def test_nothing_is_taken_for_compared_that_ends_before_the_slowest_server_is_awake(tmp_path: Path) -> None:
    """A server goes on as soon as it is awake itself, and others may need long."""

    async def story(server: Server, nap: Nap) -> None:
        instance = server.instance
        assert instance is not None
        instance.checks["weights"] = asyncio.create_task(asyncio.sleep(0))
        await nap.fall_asleep()
        assert instance.checks, "what came before it fell asleep was compared"
        hold_answers(instance)
        waking = asyncio.create_task(nap.wake_up())
        while "wake_up" not in asked_of(instance):
            await asyncio.wait([waking], timeout=0.01)
        assert instance.checks == {}
        assert not waking.done()
        let_answers_go(instance)
        await waking

    with_server(tmp_path, [REAL_PYTHON, "-c", SLEEPS], story)
