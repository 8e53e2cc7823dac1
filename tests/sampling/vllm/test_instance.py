"""Whether a server answers is its engine's to say: for a moment it does not know that its engine ends."""

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from tinsmith.sampling.vllm.connection import Connection
from tinsmith.sampling.vllm.instance import Instance, Slots


@pytest.mark.parametrize(("health", "engine", "answers"), [(200, 200, True), (200, 500, False), (503, 200, False)])
def test_a_server_whose_engine_ends_does_not_answer(health: int, engine: int, answers: bool, tmp_path: Path) -> None:
    async def run() -> bool:
        app = web.Application()

        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=health if request.path == "/health" else engine)

        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        instance = Instance(Connection(f"unix:{tmp_path / 'socket'}"), Slots(1), 1, True, "file")
        try:
            return await instance.answers()
        finally:
            await instance.connection.close()
            await runner.cleanup()

    assert asyncio.run(run()) is answers
