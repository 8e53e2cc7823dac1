"""Runs a server until it is stopped: the engine process, and what answers HTTP (`http_side.py`)."""

import asyncio
import logging
import signal
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from tinsmith.config import Config, ServerConfig
from tinsmith.errors import StoreUnavailableError, reported
from tinsmith.server.engine_program import EngineProgram
from tinsmith.server.hub import Hub
from tinsmith.server.lifetimes import keep_up
from tinsmith.store.store import Store

if TYPE_CHECKING:
    from tinsmith.server.http_side import HttpSide

log = logging.getLogger(__name__)

_FIRST_S = 1.0
"""Seconds for which all else waits for the engine to be told how to start. The database may be away."""


def run_until_stopped(
    config: Config,
    engine: EngineProgram,
    listener: socket.socket,
    for_metrics: socket.socket | None,
    store: Store,
    data_dir: Path,
    until_ready: bool,
) -> list[int]:
    """Serve with `engine` until a signal, or until it is ready; returns the signals that came."""
    return uvloop.run(_serve(config, engine, listener, for_metrics, store, data_dir, until_ready))


async def _serve(
    config: Config,
    engine: EngineProgram,
    listener: socket.socket,
    for_metrics: socket.socket | None,
    store: Store,
    data_dir: Path,
    until_ready: bool,
) -> list[int]:
    hub = Hub(config, store, data_dir)
    hub.engine.spare = engine
    http: HttpSide | None = None
    stop = asyncio.Event()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        if number == signal.SIGHUP and stop.is_set():
            return  # a terminal that is closed sends two: its shell does, and the system
        signals.append(number)
        holds = hub.engine.takes_messages
        if stop.is_set():
            log.warning("the server ends at once%s", ": the next one brings its models back" if holds else "")
            if http is not None:
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
    begun_task = asyncio.create_task(hub.engine.begun.wait())
    await asyncio.wait([engine_task, begun_task], timeout=_FIRST_S, return_when=asyncio.FIRST_COMPLETED)
    from tinsmith.server import http_side  # which takes a second: the engine starts meanwhile

    http = http_side.HttpSide(hub, data_dir)
    http_task = asyncio.create_task(http.serve(listener, for_metrics))
    warm_task = asyncio.create_task(http.warm_when_ready())
    stop_task = asyncio.create_task(stop.wait())
    lifetimes_task = asyncio.create_task(keep_up(hub.lifetimes, partial(hub.end_session, save=True)))
    ready_task = [asyncio.create_task(hub.engine.ready.wait())] if until_ready else []
    await asyncio.wait([engine_task, http_task, stop_task, *ready_task], return_when=asyncio.FIRST_COMPLETED)
    http.end()
    hub.waiters.close()
    hub.samples.end_streams()
    await hub.engine.stop()
    await http_task
    for waiting in (begun_task, stop_task, warm_task, *ready_task):
        waiting.cancel()
    lifetimes_task.cancel()
    try:
        await engine_task
    finally:
        http.close()
        hub.close()
        with reported(StoreUnavailableError, partial(log.error, "what the last samples have used is not metered: %s")):
            await hub.budgets.flush()
        hub.store.close()
    return signals


def _announce(config: Config, listener: socket.socket) -> None:
    log.info("listening on %s, data in %s", _url(listener, config.server), config.data_dir)


def _url(listener: socket.socket, server: ServerConfig) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if server.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
