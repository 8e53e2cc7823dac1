"""Runs a server until it is stopped: HTTP, the engine process and the process that parses large requests."""

import asyncio
import logging
import signal
import socket
from functools import partial
from pathlib import Path

import uvloop

from tinsmith.config import Config, ServerConfig
from tinsmith.errors import StoreUnavailableError, reported
from tinsmith.server.app import HttpServer, collect_seldom, create_app, http_config
from tinsmith.server.console import warm
from tinsmith.server.front import Front, front_beside
from tinsmith.server.http_servers import HttpServers
from tinsmith.server.hub import Hub
from tinsmith.server.lifetimes import keep_up
from tinsmith.server.routes.console import FIRST_PAGES
from tinsmith.server.routes.metrics import metrics_app
from tinsmith.store.store import Store

log = logging.getLogger(__name__)


def run_until_stopped(
    config: Config,
    listener: socket.socket,
    for_metrics: socket.socket | None,
    store: Store,
    data_dir: Path,
    until_ready: bool,
) -> list[int]:
    """Serve until a signal, or until the engine is ready; returns the signals that came."""
    return uvloop.run(_serve(config, listener, for_metrics, store, data_dir, until_ready))


async def _serve(
    config: Config,
    listener: socket.socket,
    for_metrics: socket.socket | None,
    store: Store,
    data_dir: Path,
    until_ready: bool,
) -> list[int]:
    hub = Hub(config, store, data_dir)
    front = front_beside(hub, data_dir)
    collect_seldom()
    http = _http_of(hub, front)
    beside = HttpServer(http_config(metrics_app(front), config.server))
    stop = asyncio.Event()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        if number == signal.SIGHUP and stop.is_set():
            return  # a terminal that is closed sends two: its shell does, and the system
        signals.append(number)
        holds = hub.engine.takes_messages
        if stop.is_set():
            log.warning("the server ends at once%s", ": the next one brings its models back" if holds else "")
            http.end(at_once=True)
            hub.engine.kill()
        elif holds:
            log.info(
                "the server stops once its engine has saved the models that are loaded; a second Ctrl-C ends it at once"
            )
        else:
            log.info("the server stops; its engine is not ready, and has no models to save")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # under nohup it is ignored
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    _announce(config, listener)
    if for_metrics is not None:
        log.info("metrics at %s/metrics", _url(for_metrics, config.server))
    engine_task = asyncio.create_task(hub.engine.run())
    http_task = asyncio.create_task(http.serve([listener]))
    beside_task = None if for_metrics is None else asyncio.create_task(beside.serve([for_metrics]))
    warm_task = asyncio.create_task(_warm_when_ready(hub, front))
    stop_task = asyncio.create_task(stop.wait())
    lifetimes_task = asyncio.create_task(keep_up(hub.lifetimes, partial(hub.end_session, save=True)))
    ready_task = [asyncio.create_task(hub.engine.ready.wait())] if until_ready else []
    await asyncio.wait([engine_task, http_task, stop_task, *ready_task], return_when=asyncio.FIRST_COMPLETED)
    http.end()
    beside.end()
    hub.waiters.close()
    hub.samples.end_streams()
    front.live.close()
    await hub.engine.stop()
    await http_task
    if beside_task is not None:
        await beside_task
    for waiting in (stop_task, warm_task, *ready_task):
        waiting.cancel()
    lifetimes_task.cancel()
    try:
        await engine_task
    finally:
        front.bodies.parser.close()
        hub.close()
        with reported(StoreUnavailableError, partial(log.error, "what the last samples have used is not metered: %s")):
            await hub.budgets.flush()
        hub.store.close()
    return signals


async def _warm_when_ready(hub: Hub, front: Front) -> None:
    await hub.engine.ready.wait()
    if hub.config.server.http_servers == 1:
        await warm(front, FIRST_PAGES)


def _http_of(hub: Hub, front: Front) -> HttpServer | HttpServers:
    """Make the servers that answer HTTP: this process, with `front`, or several others."""
    if hub.config.server.http_servers > 1:
        return HttpServers(hub)
    front.bodies.parser.start()
    return HttpServer(http_config(create_app(front), hub.config.server))


def _announce(config: Config, listener: socket.socket) -> None:
    log.info("listening on %s, data in %s", _url(listener, config.server), config.data_dir)


def _url(listener: socket.socket, server: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if server.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
