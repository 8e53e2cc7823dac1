"""Whether a server answers is its engine's to say: for a moment it does not know that its engine ends."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import web

from tinsmith.sampling.vllm import instance as room
from tinsmith.sampling.vllm.connection import Connection
from tinsmith.sampling.vllm.instance import Instance, Slots

T = TypeVar("T")


def asked(directory: Path, answer: Callable[[web.Request], Awaitable[web.Response]], question: Callable[[Instance], Awaitable[T]]) -> T:
    """What comes of a question to an instance that answers so."""

    async def run() -> T:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(directory / "socket")).start()
        instance = Instance(Connection(f"unix:{directory / 'socket'}"), Slots(1), 1, True, "file")
        try:
            return await question(instance)
        finally:
            await instance.connection.close()
            await runner.cleanup()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("health", "engine", "workers", "answers"),
    [(200, 200, 200, True), (200, 500, 200, False), (503, 200, 200, False), (200, 200, 500, False)],
)
def test_a_server_whose_engine_or_worker_ends_does_not_answer(
    health: int, engine: int, workers: int, answers: bool, tmp_path: Path
) -> None:
    status = {"/health": health, "/is_paused": engine, "/collective_rpc": workers}

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status[request.path])

    assert asked(tmp_path, answer, Instance.answers) is answers


@pytest.mark.parametrize(("end", "seen"), [("never", "silent"), ("answer", "answers"), ("die", "lost"), ("refuse once", "answers")])
def test_an_engine_that_is_silent_may_answer_later_or_have_ended(
    end: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only /health tells of the end; what the engine was asked before is never answered. An error of a proxy is no end."""
    monkeypatch.setattr(room, "_LOOK_AGAIN_S", 0.05)
    looked = refused = 0
    later = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal looked, refused
        if request.path != "/health":
            if end == "refuse once":
                refused += 1
                return web.Response(status=504 if refused == 1 else 200)
            await later.wait()
            return web.Response()
        looked += 1
        if looked == 5 and end == "answer":
            later.set()
        return web.Response(status=503 if looked >= 5 and end == "die" else 200)

    async def look(instance: Instance) -> str:
        return await instance.look(0.5 if end == "never" else 600)

    assert asked(tmp_path, answer, look) == seen
    assert looked >= {"never": 0, "refuse once": 1}.get(end, 5)
