"""A process that answers as a vLLM server does to those who ask whether it lives: `python stub_server.py --uds SOCKET`."""

import asyncio
import os
import signal
import sys

from aiohttp import web

engine_ended, worker_ended, engine_free = asyncio.Event(), asyncio.Event(), asyncio.Event()
engine_free.set()


async def live(request: web.Request) -> web.Response:
    if engine_ended.is_set():
        return web.json_response({"error": "EngineDeadError"}, status=503)
    if request.path != "/health":
        await engine_free.wait()
    return web.json_response({"is_paused": False})


async def be_busy(request: web.Request) -> web.Response:
    """For so many seconds its engine answers nothing, as during a long step."""
    engine_free.clear()
    asyncio.get_running_loop().call_later(float(request.query["for_s"]), engine_free.set)
    return web.Response()


async def take_long(_: web.Request) -> web.Response:
    await asyncio.sleep(2)
    return web.json_response({"took": "long"})


async def never_answer(_: web.Request) -> web.Response:
    """The engine ends while this is under way: vLLM answers that it is dead to all who ask from now on, and nothing to this one."""
    engine_ended.set()
    await asyncio.Event().wait()
    return web.Response()


async def die(_: web.Request) -> web.Response:
    os.kill(os.getpid(), signal.SIGKILL)
    return web.Response()


async def lose_worker(_: web.Request) -> web.Response:
    worker_ended.set()
    return web.Response()


async def ask_workers(_: web.Request) -> web.Response:
    return web.Response(status=500 if worker_ended.is_set() else 200)


if __name__ == "__main__":
    os.setpgrp()
    app = web.Application()
    routes = {
        "/health": live,
        "/is_paused": live,
        "/long": take_long,
        "/never": never_answer,
        "/lose_worker": lose_worker,
        "/busy": be_busy,
        "/die": die,
    }
    app.add_routes([web.get(path, handler) for path, handler in routes.items()])
    app.add_routes([web.post("/collective_rpc", ask_workers)])
    web.run_app(app, path=sys.argv[-1], print=None)
