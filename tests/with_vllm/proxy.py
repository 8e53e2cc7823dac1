"""A proxy in front of a real vLLM server: it writes down what a client asks it, and may refuse some of it.

Adapters get names of their own, so that two proxies of one server are two servers to their client.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

GENERATE = "/inference/v1/generate"


class Proxy:
    """What has passed so far. A test may replace `refusal`."""

    def __init__(self, target: str) -> None:
        """`target` is the path of the server's socket."""
        self.target = target
        self._prefix = f"by-{id(self)}-"
        self.pictures: Counter[str] = Counter()
        """How often the pixel values of a picture, known by its hash, were sent."""
        self.generates: list[dict[str, Any]] = []
        """The bodies of all requests for tokens."""
        self.at_once = self.most_at_once = 0
        """Sequences that are being sampled, and that ever were."""
        self.refusal: Callable[[dict[str, Any]], web.Response | None] = lambda _: None
        """What to answer to a request for tokens instead of the server."""
        self.break_down: Callable[[], None] = lambda: None
        """Close all connections, and take no more."""

    async def pass_on(self, request: web.Request) -> web.Response:
        """One request, and the server's reply."""
        body = await request.read()
        asked = orjson.loads(body) if body else {}
        for field in ("lora_name", "model"):
            if asked.get(field):
                asked[field] = self._prefix + asked[field]
        if request.path == "/collective_rpc":
            asked["args"] = [self._prefix + name for name in asked["args"]]
        body = orjson.dumps(asked)
        if request.path != GENERATE:
            return await self._ask(request, body)
        self._note(asked)
        sequences = asked["sampling_params"].get("n", 1)
        self.at_once += sequences
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return self.refusal(asked) or await self._ask(request, body)
        finally:
            self.at_once -= sequences

    def _note(self, asked: dict[str, Any]) -> None:
        self.generates.append(asked)
        if asked["features"]:
            sent = zip(asked["features"]["mm_hashes"]["image"], asked["features"]["kwargs_data"]["image"], strict=True)
            self.pictures.update(key for key, data in sent if data is not None)

    async def _ask(self, request: web.Request, body: bytes) -> web.Response:
        async with (
            aiohttp.ClientSession("http://vllm", connector=aiohttp.UnixConnector(self.target)) as session,
            session.request(request.method, request.path_qs, data=body, headers={"Content-Type": "application/json"}) as reply,
        ):
            answer = (await reply.read()).replace(self._prefix.encode(), b"")
            return web.Response(body=answer, status=reply.status, content_type=reply.content_type)


@contextmanager
def in_front_of(socket: str, directory: Path) -> Iterator[tuple[Proxy, str]]:
    """A proxy of the server at `socket`, and its own address in `directory`."""
    proxy, loop = Proxy(socket.removeprefix("unix:")), asyncio.new_event_loop()
    address = directory / "proxy"

    async def open_up() -> web.AppRunner:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", proxy.pass_on)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(address)).start()
        return runner

    runner = loop.run_until_complete(open_up())
    proxy.break_down = lambda: asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield proxy, f"unix:{address}"
    finally:
        proxy.break_down()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
