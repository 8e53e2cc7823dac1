"""A process that answers as a vLLM server does to those who ask whether it lives: `python stub_server.py [--sleeps]
--uds SOCKET`.

With `--sleeps` it takes the requests to sleep and to wake up.
"""

import asyncio
import os
import signal
import sys

from aiohttp import web

engine_ended, worker_ended, engine_free = asyncio.Event(), asyncio.Event(), asyncio.Event()
engine_free.set()
switches: list[str] = []
"""What it was told of sleeping and waking."""


async def answer(request: web.Request) -> web.Response:
    """What it answers to any request."""
    match request.path:
        case "/health" | "/is_paused":
            return await live(request)
        case "/collective_rpc":
            return web.Response(status=500 if worker_ended.is_set() else 200)
        case "/sleep" | "/wake_up" | "/switches" if "--sleeps" in sys.argv:
            return await switch(request)
        case "/long":
            await asyncio.sleep(4)
            return web.json_response({"took": "long"})
        case "/busy":  # for so many seconds its engine answers nothing, as during a long step
            engine_free.clear()
            asyncio.get_running_loop().call_later(float(request.query["for_s"]), engine_free.set)
        # The engine ends while this is under way: vLLM tells all who ask from now on, and answers nothing to this one
        case "/never":
            engine_ended.set()
            await asyncio.Event().wait()
        case "/lose_worker":
            worker_ended.set()
        case "/stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "/die":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            return web.Response(status=404)
    return web.Response()


async def live(request: web.Request) -> web.Response:
    if engine_ended.is_set():
        return web.json_response({"error": "EngineDeadError"}, status=503)
    if request.path != "/health":
        await engine_free.wait()
    return web.json_response({"is_paused": False})


async def switch(request: web.Request) -> web.Response:
    if request.path != "/switches":
        switches.append(request.path_qs)
        await engine_free.wait()
    return web.json_response(switches)


if __name__ == "__main__":
    os.setpgrp()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    web.run_app(app, path=sys.argv[-1], print=None)
