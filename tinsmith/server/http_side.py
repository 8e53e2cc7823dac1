"""The part of a server that answers HTTP, in this process or in several others, and metrics at another address."""

import asyncio
import socket
from pathlib import Path

from tinsmith.server.app import HttpServer, collect_seldom, create_app, http_config
from tinsmith.server.console import warm
from tinsmith.server.front import front_beside
from tinsmith.server.http_servers import HttpServers
from tinsmith.server.hub import Hub
from tinsmith.server.routes.console import FIRST_PAGES
from tinsmith.server.routes.metrics import metrics_app


class HttpSide:
    """Answers HTTP from `serve` to `end`."""

    def __init__(self, hub: Hub, data_dir: Path) -> None:
        """Make it in the event loop, beside the hub."""
        self._hub = hub
        self._front = front_beside(hub, data_dir)
        collect_seldom()
        self._metrics = HttpServer(http_config(metrics_app(self._front), hub.config.server))
        self._servers: HttpServer | HttpServers
        if hub.config.server.http_servers > 1:
            self._servers = HttpServers(hub)
        else:
            self._front.bodies.parser.start()
            self._servers = HttpServer(http_config(create_app(self._front), hub.config.server))

    async def serve(self, listener: socket.socket, for_metrics: socket.socket | None) -> None:
        """Accept from `listener`, and requests for metrics from another socket, until `end`."""
        beside = [] if for_metrics is None else [self._metrics.serve([for_metrics])]
        await asyncio.gather(self._servers.serve([listener]), *beside)

    async def warm_when_ready(self) -> None:
        """Make the console's first pages once the engine is ready: they are quick for the first who looks."""
        await self._hub.engine.ready.wait()
        if self._hub.config.server.http_servers == 1:
            await warm(self._front, FIRST_PAGES)

    def end(self, at_once: bool = False) -> None:
        """Accept nothing more; connections end when their requests are answered, or at once."""
        self._servers.end(at_once)
        self._metrics.end(at_once)
        self._front.live.close()

    def close(self) -> None:
        """End the process that parses large requests."""
        self._front.bodies.parser.close()
