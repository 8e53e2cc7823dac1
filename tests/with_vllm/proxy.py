"""A proxy in front of a real vLLM server: it writes down what a client asks it, and may refuse some of it.

Adapters get names of their own: the server has those of its own engine, too.
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
        self.images: Counter[str] = Counter()
        """How often the pixel values of an image, known by its hash, were sent."""
        self.at_once = self.most_at_once = 0
        """Sequences that are being sampled, and that ever were."""
        self.refusal: Callable[[dict[str, Any]], web.Response | None] = lambda _: None
        """What to answer to a request for tokens instead of the server."""

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
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
        if asked["features"]:
            sent = zip(asked["features"]["mm_hashes"]["image"], asked["features"]["kwargs_data"]["image"], strict=True)
            self.images.update(key for key, data in sent if data is not None)

    async def _ask(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with (
            aiohttp.ClientSession("http://vllm", connector=aiohttp.UnixConnector(self.target)) as session,
            session.request(
                request.method, request.path_qs, data=body, headers={"Content-Type": "application/json"}
            ) as reply,
        ):
            if reply.content_type != "text/event-stream":
                answer = (await reply.read()).replace(self._prefix.encode(), b"")
                return web.Response(body=answer, status=reply.status, content_type=reply.content_type)
            stream = web.StreamResponse(headers={"Content-Type": reply.content_type})
            await stream.prepare(request)
            async for line in reply.content:
                await stream.write(line.replace(self._prefix.encode(), b""))
            return stream


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
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield proxy, f"unix:{address}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
