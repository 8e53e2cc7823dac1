"""A process that answers as a vLLM server does to those who ask whether it instances: `python stub_server.py --uds SOCKET`."""

import asyncio
import os
import sys

from aiohttp import web


async def live(_: web.Request) -> web.Response:
    return web.json_response({"is_paused": False})


async def take_long(_: web.Request) -> web.Response:
    await asyncio.sleep(2)
    return web.json_response({"took": "long"})


if __name__ == "__main__":
    os.setpgrp()
    app = web.Application()
    app.add_routes([web.get("/health", live), web.get("/is_paused", live), web.get("/long", take_long)])
    web.run_app(app, path=sys.argv[-1], print=None)
