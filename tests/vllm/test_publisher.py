"""Getting weights onto a server and comparing them, with one that only says what it was asked: real sockets, made-up answers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.bases import renderer
from tinsmith.models.base import BaseModel
from tinsmith.vllm.canary import Canary
from tinsmith.vllm.connection import Connection
from tinsmith.vllm.gate import UNKNOWN
from tinsmith.vllm.publisher import Publisher
from tinsmith.vllm.servers import Life
from tinsmith.vllm.version import Version
from tinsmith.vllm.weights import WeightFiles


def with_publisher(base: BaseModel, directory: Path, story: Callable[[Publisher, Life, Version, list[str]], Awaitable[None]]) -> None:
    """Tell the story to a publisher and the life of a server that has a single slot and computes what the trainer does.

    The last argument fills with the paths that the server is asked for.
    """
    canary = Canary(base, renderer(base))
    version = Version(None, canary.expected(None), "base")
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path != "/inference/v1/generate":
            return web.json_response({"weight_version": "default"})
        ids = (await request.json())["token_ids"]
        values = np.zeros(len(ids))
        values[canary.text] = version.canary
        scores: list[Any] = [None, *({str(token): {"logprob": value}} for token, value in zip(ids[1:], values[1:].tolist(), strict=True))]
        return web.json_response({"choices": [], "prompt_logprobs": scores})

    async def tell() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(directory / "socket")).start()
        life = Life(Connection(f"unix:{directory / 'socket'}"), asyncio.Semaphore(1), 1, True, "file")
        files = WeightFiles(base, str(directory))
        try:
            await story(Publisher(files, canary), life, version, asked)
        finally:
            await life.connection.close()
            await runner.cleanup()
            files.close()

    asyncio.run(tell())


@pytest.mark.parametrize("base", ["text_base", "vision_base"])
def test_new_weights_are_compared_while_samples_fill_all_slots(base: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """They would wait for samples that wait for them. With pictures, one goes ahead."""

    async def story(publisher: Publisher, life: Life, version: Version, asked: list[str]) -> None:
        async with life.slots, asyncio.timeout(10), publisher.serving(life, version):
            pass
        assert asked == ["/weight_info", *["/inference/v1/generate"] * (2 if base == "vision_base" else 1)]

    with_publisher(request.getfixturevalue(base), tmp_path, story)


def test_after_a_transfer_everything_is_compared_anew(text_base: BaseModel, tmp_path: Path) -> None:
    """Adapters too: they lie over what has come."""

    async def story(publisher: Publisher, life: Life, version: Version, asked: list[str]) -> None:
        async with publisher.serving(life, version):
            pass
        life.checks[7] = life.checks[0]
        life.gate.weights = UNKNOWN
        async with publisher.serving(life, version):
            assert 7 not in life.checks
        assert asked.count("/update_weights") == 1
        assert asked.count("/inference/v1/generate") == 2

    with_publisher(text_base, tmp_path, story)
