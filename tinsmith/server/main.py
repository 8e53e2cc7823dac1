"""Starts a server: checks its address, data directory, database and keys, and holds them while it runs.

`until_stopped.py`, which takes a second to import, comes after these checks: what is wrong is said before.
"""

import contextlib
import errno
import ipaddress
import shlex
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from tinsmith.config import Config, ServerConfig
from tinsmith.errors import ConfigError, translated
from tinsmith.logs import start_logging
from tinsmith.server.engine_program import EngineProgram
from tinsmith.store.database import use_database
from tinsmith.store.disk import only_user
from tinsmith.store.keys import list_keys
from tinsmith.store.store import Store

_BACKLOG = 2048


def run_server(config: Config, engine: EngineProgram) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. A second signal ends the server at once, with SystemExit.

    Raises ConfigError: no base model, an unusable address, data_dir or database, or an engine that was never ready.
    """
    _run(config, engine, until_ready=False)


def warm_up(config: Config, engine: EngineProgram) -> float:
    """Run a server until its engine is ready, for what the next start finds then; returns the seconds it took.

    Raises as `run_server`.
    """
    began = time.monotonic()
    _run(config, engine, until_ready=True)
    return time.monotonic() - began


def _run(config: Config, engine: EngineProgram, until_ready: bool) -> None:
    start_logging("server", config.log_level, config.log_format)
    if not config.base_models:
        raise ConfigError("base_models is empty; name at least one base model, as --base-model [NAME=]PATH_OR_HUB_ID")
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
        from tinsmith.server.until_stopped import run_until_stopped

        signals = run_until_stopped(config, engine, listener, for_metrics, store, data_dir, until_ready)
    if len(signals) > 1 or (signals and until_ready):
        raise SystemExit(128 + signals[-1])


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
            else f"{error}; give --host an address of this machine, such as 127.0.0.1"
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


def _require_keys_or_loopback(config: Config, listener: socket.socket, store: Store) -> None:
    """Raise ConfigError if others than this machine could reach a server that asks nobody for a key."""
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback and not list_keys(store):
        raise ConfigError(
            f"host={config.server.host} can be reached from other machines, and there are no API keys: make one with "
            f"`tinsmith keys add NAME --data-dir {shlex.quote(config.data_dir)}`, or use --host 127.0.0.1"
        )
