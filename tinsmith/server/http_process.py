"""`python -m tinsmith.server.http_process HUB LISTENER`: one of several HTTP servers.

Started by the server with two sockets, as descriptors, and the configuration as JSON on standard input. It reads the
database itself, and asks the hub for all else.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import orjson
import uvloop

from tinsmith.config import Config, from_tree
from tinsmith.logs import start_logging
from tinsmith.protocol.child_process import WATCH_S, end_with_parent, leave_signals_to_server
from tinsmith.server import calls
from tinsmith.server.app import HttpServer, collect_seldom, create_app, http_config
from tinsmith.server.async_store import AsyncStore
from tinsmith.server.base_models import BaseModels
from tinsmith.server.calling import HubAtDistance
from tinsmith.server.console import warm
from tinsmith.server.front import Front
from tinsmith.server.routes.console import FIRST_PAGES
from tinsmith.store.store import Store

Params = ParamSpec("Params")
Result = TypeVar("Result")


class _ReadHere(AsyncStore):
    """The store of an HTTP server: the hub does all writes, one behind the other."""

    def __init__(self, store: Store, ask: HubAtDistance) -> None:
        super().__init__(store)
        self._ask = ask

    async def write(
        self, method: Callable[Concatenate[Store, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> Result:
        return await self._ask(calls.write, method, *args, **kwargs)


async def _serve(config: Config, ours: socket.socket, listener: socket.socket, store: Store) -> None:
    """Serve until the hub says that it stops. The end of the hub ends the process: another server needs the port."""
    ask, base_models = HubAtDistance(), BaseModels()
    stored = _ReadHere(store, ask)
    front = Front(config, Path(config.data_dir), stored, base_models, ask)
    collect_seldom()
    front.bodies.parser.start()
    http = HttpServer(http_config(create_app(front), config.server))

    async def end_with_hub() -> None:
        await ask.lost.wait()
        os._exit(1)

    async def follow_base_models(known: list[dict[str, Any]]) -> None:
        while True:
            known = await ask(calls.base_models_beside, known)
            base_models.replace(known)

    async def show_life() -> None:
        while True:
            await ask(calls.alive)
            await asyncio.sleep(WATCH_S / 2)

    await ask.connect(ours)
    ending = asyncio.create_task(end_with_hub())
    known = await ask(calls.base_models_beside, None)  # no key is refused because a model is not known here yet
    base_models.replace(known)
    stop = asyncio.create_task(ask(calls.until_stop))
    serving = asyncio.create_task(http.serve([listener]))
    beside = [asyncio.create_task(each) for each in (follow_base_models(known), show_life())]
    warming = asyncio.create_task(warm(front, FIRST_PAGES))
    await asyncio.wait([stop, serving, ending, *beside], return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        os._exit(1)
    http.end()
    warming.cancel()
    front.live.close()
    await serving
    front.bodies.parser.close()
    stored.close()


def main() -> None:
    """Answer HTTP until the server ends."""
    leave_signals_to_server()
    end_with_parent()
    config = from_tree(orjson.loads(sys.stdin.buffer.read()))
    start_logging("http", config.log_level, config.log_format)
    ours, listener = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
    store = Store.open(Path(config.data_dir))
    uvloop.run(_serve(config, ours, listener, store))
    store.close()


if __name__ == "__main__":
    main()
