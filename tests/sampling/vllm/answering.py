"""Servers in the test's own process that answer on a real socket, and tests that run in an event loop."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec

from aiohttp import web

from tinsmith.sampling.vllm.instance import Instance, Slots
from tinsmith.sampling.vllm.protocol import Connection

P = ParamSpec("P")


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: P.args, **fixtures: P.kwargs) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


@asynccontextmanager
async def answering(
    directory: Path, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> AsyncIterator[Connection]:
    """A connection with a server that answers so, whatever it is asked."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(directory / "socket")).start()
    connection = Connection(f"unix:{directory / 'socket'}")
    try:
        yield connection
    finally:
        await connection.close()
        await runner.cleanup()


def abort(request: web.Request) -> None:
    """Break the connection."""
    assert request.transport is not None
    request.transport.abort()


def scores(ids: list[int], logprobs: Iterable[float]) -> list[Any]:
    """The prompt_logprobs of a server that has computed these for all tokens but the first."""
    return [None, *({str(token): {"logprob": logprob}} for token, logprob in zip(ids[1:], logprobs, strict=True))]


class Agreeing:
    """A server that agrees with the trainer on a canary, and says what it was asked."""

    def __init__(self) -> None:
        self.canary: list[float] = []
        """Log-probabilities behind the first token of the canary."""
        self.asked: list[str] = []
        """The paths that it was asked for."""
        self.failures: dict[str, str] = {}
        """What it fails with, by path; with an empty text it breaks the connection instead."""
        self.name: str | None = None
        """What it calls the weights that it computed with; None for those it was asked for."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """What it says to any request."""
        self.asked.append(request.path)
        if (words := self.failures.get(request.path)) is not None:
            if not words:
                abort(request)
            return web.json_response({"error": {"message": words}}, status=500)
        if request.path == "/collective_rpc":
            return web.json_response({"results": [{"checked": True}]})
        if request.path == "/inference/v1/generate":
            return await self.generate(request, await request.json())
        return web.json_response({"weight_version": "default"})

    async def generate(self, _: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """What it says to one who asks for tokens."""
        answered = {
            "choices": [],
            "prompt_logprobs": scores(body["token_ids"], self.canary),
            "model": self.name or body["model"],
        }
        return web.json_response(answered)


def instance_of(connection: Connection) -> Instance:
    """A server with a single slot, whose weights come as files."""
    return Instance(connection, Slots(1), 1, True, "file")
