"""Starts and stops a server: HTTP, the engine process and the process that parses large requests."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import shlex
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import uvloop

from tinsmith.config import Config, ServerConfig
from tinsmith.errors import ConfigError, StoreUnavailableError, reported, translated
from tinsmith.logs import start_logging
from tinsmith.server.app import HttpServer, collect_seldom, create_app, http_config
from tinsmith.server.front import Front, front_beside
from tinsmith.server.http_servers import HttpServers
from tinsmith.server.hub import Hub
from tinsmith.server.lifetimes import keep_up
from tinsmith.server.routes.metrics import metrics_app
from tinsmith.store.database import use_database
from tinsmith.store.disk import only_user
from tinsmith.store.keys import list_keys
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

_BACKLOG = 2048
_OPEN_FILES = 65536
"""Limit on open files to ask for: connections of three clients reach the usual 1024."""


def run_server(config: Config) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. A second signal ends the server at once, with SystemExit.

    Raises ConfigError: no base model, an unusable address, data_dir or database, or an engine that was never ready.
    """
    _run(config, until_ready=False)


def warm_up(config: Config) -> float:
    """Run a server until its engine is ready, for what the next start finds then; returns the seconds it took.

    Raises as `run_server`.
    """
    began = time.monotonic()
    _run(config, until_ready=True)
    return time.monotonic() - began


def _run(config: Config, until_ready: bool) -> None:
    start_logging("server", config.log_level, config.log_format)
    if not config.base_models:
        raise ConfigError("base_models is empty; name at least one base model, as --base-model [NAME=]PATH_OR_HUB_ID")
    _allow_open_files()
    require_usable_tls(config.server)
    data_dir = Path(config.data_dir)
    keep_bytes = config.server.kept_operations_mib * 2**20
    server = config.server
    use_database(data_dir, config.database_url)
    config.database_url = ""  # the directory has it now: no worker is told the password
    with (
        listening(server.host, server.port) as listener,
        _listening_for_metrics(server.metrics_address) as for_metrics,
        contextlib.closing(Store.open(data_dir, keep_bytes=keep_bytes)) as store,
        only_user(data_dir) as alone,
    ):
        if not alone:
            raise ConfigError(f"data_dir={data_dir} is used by another server; stop it or choose another directory")
        store.hold()
        store.check()
        _require_keys_or_loopback(config, listener, store)
        signals = uvloop.run(_serve(config, listener, for_metrics, store, data_dir, until_ready))
    if len(signals) > 1 or (signals and until_ready):
        raise SystemExit(128 + signals[-1])


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def require_usable_tls(server: ServerConfig) -> None:
    """Raise ConfigError for certificates or a key that cannot be used, and for networks that are none."""
    for network in server.trusted_proxies:
        with translated(ValueError, ConfigError, lambda error: f"trusted_proxies={error}; give an address or network"):
            ipaddress.ip_network(network)
    if server.tls_key and not server.tls_cert:
        raise ConfigError(f"tls_key={server.tls_key} has no effect without --tls-cert")
    if server.tls_cert:
        files = f"tls_cert={server.tls_cert}, tls_key={server.tls_key or server.tls_cert}"
        with translated(OSError, ConfigError, lambda error: f"{files} cannot be used: {error}; give PEM files"):
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(server.tls_cert, server.tls_key or None, password="")  # nobody is asked for one


@contextlib.contextmanager
def listening(host: str, port: int, option: str = "--port {}") -> Iterator[socket.socket]:
    """A socket at this address, whose port `option` sets. Raises ConfigError."""

    def why_not(error: OSError) -> str:
        used = error.errno == errno.EADDRINUSE
        remedy = (
            f"another program listens there; stop it, or choose another port with {option.format(port + 1)}"
            if used
            else str(error)
        )
        return f"cannot listen on host={host} port={port}: {remedy}"

    with translated(OSError, ConfigError, why_not):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    with listener:
        yield listener


@contextlib.contextmanager
def _listening_for_metrics(address: str) -> Iterator[socket.socket | None]:
    """A socket at HOST:PORT; None without an address. Raises ConfigError."""
    if not address:
        yield None
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"metrics_address={address!r} is not HOST:PORT; give it as --metrics-address 127.0.0.1:9100")
    with listening(host.strip("[]"), int(port), f"--metrics-address {host}:{{}}") as listener:
        yield listener


async def _serve(
    config: Config,
    listener: socket.socket,
    for_metrics: socket.socket | None,
    store: Store,
    data_dir: Path,
    until_ready: bool,
) -> list[int]:
    """Serve until a signal, or until the engine is ready; returns the signals that came."""
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
    for waiting in (stop_task, *ready_task):
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


def _require_keys_or_loopback(config: Config, listener: socket.socket, store: Store) -> None:
    """Raise ConfigError if others than this machine could reach a server that asks nobody for a key."""
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback and not list_keys(store):
        raise ConfigError(
            f"host={config.server.host} can be reached from other machines, and there are no API keys: make one with "
            f"`tinsmith keys add NAME --data-dir {shlex.quote(config.data_dir)}`, or use --host 127.0.0.1"
        )
