"""Servers that sleep together while the trainer has their GPU: real processes on real sockets, which only say that they live."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.sampling.vllm import stub_server
from tests.sampling.vllm.test_servers import HUNG_S, ready
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.nap import Nap
from tinsmith.sampling.vllm.servers import Launch, Server, Servers

SLEEPS = """
from aiohttp import web
from tests.sampling.vllm.stub_server import live
import os, sys

async def switch(request):
    with open(sys.argv[-1] + ".asked", "a") as file:
        file.write(request.path_qs + "\\n")
    return web.Response()

os.setpgrp()
app = web.Application()
app.add_routes([web.get("/health", live), web.get("/is_paused", live), web.post("/sleep", switch), web.post("/wake_up", switch)])
web.run_app(app, path=sys.argv[-1], print=None)
"""


def with_server(directory: Path, command: list[str], story: Callable[[Server, Nap], Awaitable[None]]) -> None:
    """Tell the story to a server that is ready."""

    async def tell() -> None:
        changed, nap = asyncio.Condition(), Nap()
        source = Launch(command, os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, directory, "stub", directory / "log", "file")
        servers = Servers([Server(source, 8, HUNG_S, changed, nap=nap)], changed)
        try:
            async with asyncio.timeout(600):
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

    with_server(tmp_path, [sys.executable, "-c", SLEEPS], story)


def test_a_server_that_does_not_obey_is_ended_before_the_trainer_has_the_gpu_and_starts_again_when_it_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stub knows no sleep, and answers 404."""

    async def story(server: Server, nap: Nap) -> None:
        instance = server.instance
        assert instance is not None
        await nap.fall_asleep()
        assert instance.ended.is_set()
        assert server.process is not None
        assert server.process.returncode is not None
        assert nap.instances == set()
        await asyncio.sleep(0.1)
        assert nap.instances == set(), "no other has started meanwhile"
        await nap.wake_up()
        assert await (await ready(server, after=instance)).answers()

    with_server(tmp_path, [sys.executable, str(stub_server.__file__)], story)
    assert "is ended, because it does not fall asleep, or wake" in caplog.text
