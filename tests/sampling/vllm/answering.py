"""Servers in the test's own process that answer on a real socket, and tests that run in an event loop."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
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
async def answering(directory: Path, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Connection]:
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


def instance_of(connection: Connection) -> Instance:
    """A server with a single slot, whose weights come as files."""
    return Instance(connection, Slots(1), 1, True, "file")
