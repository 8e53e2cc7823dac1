"""`tinsmith ping`: what keeps a client from a server. The SDK would repeat its requests for minutes, without a word."""

import json
import os
import socket
import ssl
import threading
from contextlib import closing, suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import SplitResult, urlsplit

from tinsmith.errors import ConfigError, reported, translated
from tinsmith.http_client import HEALTH, is_local, misled_by, one_line, open_url, proxy_of, why_unanswered, without_user

_CAPABILITIES = "/api/v1/get_server_capabilities"
_PATIENCE_S = 1.0
"""Longest wait for a name, a connection or an answer."""
_PORTS = {"http": 80, "https": 443}


def ping(url: str, key: str, base_model: str) -> str:
    """A line that describes the server at a URL. `key` and `base_model` may be empty.

    Raises ConfigError: scheme, path, port, host, TLS, proxy, readiness, key or base model.
    """
    full = url.rstrip("/")
    parts, url = _checked(full), without_user(full)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    direct = is_local(url) or not proxy_of(parts)
    if direct:
        _connect(host, port, secure=parts.scheme == "https")
    _require_ready(url, full, parts)
    if proxy := misled_by(url):
        raise ConfigError(
            f"a proxy is set ({without_user(proxy)}), to which the SDK would send what is for {host}: "
            f"export NO_PROXY={host}"
        )
    if key and not key.startswith(("tml-", "eyJ")):
        raise ConfigError(
            "the API key must begin with tml-, or the SDK refuses it; Tinsmith takes any that does, "
            "such as tml-anything"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "the API key holds a character that no header can carry, a line end? Set TINKER_API_KEY to the key alone"
        )
    names = _base_models(url, full, key)
    if base_model and base_model.partition(":")[0] not in {name.partition(":")[0] for name in names}:
        raise ConfigError(f"base model {base_model!r} is not served at {url}; there are: {', '.join(names)}")
    notes = [f"{url} is ready and serves {', '.join(names)}"]
    if os.environ.get("TINKER_BASE_URL", "").rstrip("/") != full:
        notes.append(f"TINKER_BASE_URL does not name it, so scripts must: base_url={url!r}")
    if not key:
        notes.append(
            "TINKER_API_KEY is not set, so scripts must give a key: any that begins with tml-, such as tml-anything"
        )
    return "; ".join(notes)


def _checked(url: str) -> SplitResult:
    """The parts of a server's URL. Raises ConfigError."""
    shown = one_line(without_user(url))
    # Without the error's text: it quotes what it takes for the port, such as a password.
    no_url = f"{shown} is no URL: a port is a number, [ ] hold an address; give one such as http://127.0.0.1:8000"
    with translated(ValueError, ConfigError, lambda _: no_url):
        parts = urlsplit(url)
        port = parts.port
    if parts.scheme not in _PORTS or not parts.hostname or any(each.isspace() for each in url):
        raise ConfigError(f"{shown} must begin with http:// or https:// and name a host, such as http://127.0.0.1:8000")
    if port == 0:
        raise ConfigError(f"{shown}: no server listens on port 0; give the port that its log names")
    if parts.path or parts.query or parts.fragment:
        bare = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ConfigError(f"{shown}: leave the path out, clients add /api/v1 to the URL by themselves: {bare}")
    return parts


def _connect(host: str, port: int, secure: bool) -> None:
    """Connect, and speak TLS if `secure`. Raises ConfigError naming host, port or TLS."""

    def why_unreachable(error: OSError) -> str:
        if isinstance(error, ConnectionRefusedError):
            return (
                f"nothing listens on port {port} of {host}: start the server (tinsmith serve --port {port}), "
                "or correct the port; for clients of other machines start it with --host 0.0.0.0"
            )
        why = f"within {_PATIENCE_S:g} s" if isinstance(error, TimeoutError) else f"({error.strerror or error})"
        return (
            f"{host} cannot be reached on port {port} {why}: it is off or elsewhere, or a firewall is between; "
            "correct the host"
        )

    def why_insecure(error: OSError) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the TLS certificate of {host} is not trusted ({error.verify_message}): "
                "use the name that it is for, or give its authority in SSL_CERT_FILE"
            )
        return f"{host}:{port} speaks no TLS: write http://{host}:{port}"

    with translated(OSError, ConfigError, why_unreachable):
        connection = _connection(host, port)
    with closing(connection), translated(OSError, ConfigError, why_insecure):
        if secure:
            ssl.create_default_context().wrap_socket(connection, server_hostname=host).close()


def _connection(host: str, port: int) -> socket.socket:
    """A connection to the first address that takes one. Raises OSError, or ConfigError for a name without one."""
    found: list[Any] = []

    def look_up() -> None:
        with reported((OSError, UnicodeError), found.append):
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))

    looking = threading.Thread(target=look_up, daemon=True)  # a name server may keep one waiting for half a minute
    looking.start()
    looking.join(_PATIENCE_S)
    if not found or isinstance(found[0], Exception):
        why = found[0] if found else f"no name server answers within {_PATIENCE_S:g} s"
        raise ConfigError(f"the host {host!r} has no address ({why}): correct the name, or give its number")
    failures = [OSError("it has no address")]
    for *_, address in found[0]:
        with reported(OSError, failures.append):
            return socket.create_connection(address[:2], _PATIENCE_S)
    raise failures[-1]


def _require_ready(url: str, full: str, parts: SplitResult) -> None:
    """Raise ConfigError unless a server answers that is ready. `full` has user and password."""
    other = f"what answers at {url} is no Tinker server: correct the port or the host"
    try:
        with open_url(full + HEALTH, _PATIENCE_S) as reply:
            came_from, status, body = reply.geturl(), reply.status, reply.read(65536)
    except HTTPError as error:
        came_from, status, body = error.url, error.code, error.read(65536)
    except (OSError, ValueError, HTTPException) as error:  # no answer, or none that is HTTP
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            raise ConfigError(
                f"{url} does not answer within {_PATIENCE_S:g} s: it is very busy or hangs, see its log"
            ) from error
        if proxy := "" if is_local(url) else proxy_of(parts):
            raise ConfigError(
                f"{url} cannot be reached through the proxy {without_user(proxy)} ({why_unanswered(error)}); "
                "correct it, or set NO_PROXY"
            ) from error
        raise ConfigError(_https_instead(parts) or other) from error
    if came_from != url + HEALTH:
        raise ConfigError(
            f"{url} sends clients on to {one_line(without_user(came_from.removesuffix(HEALTH)))}: give that URL"
        )
    detail = _field(body, "detail")
    if status == 200 and _field(body, "status"):
        return
    if status == 503 and detail:
        raise ConfigError(f"{url} is not ready: {one_line(detail)}; wait for it, or see the server's log")
    if status in (401, 403) and detail:
        raise ConfigError(f"{url} refuses this client: {one_line(detail)}")
    raise ConfigError(_https_instead(parts) or f"{other} (HTTP {status})")


def _https_instead(parts: SplitResult) -> str:
    """The remedy for http:// where TLS is spoken, or ""."""
    if parts.scheme == "https":
        return ""
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, ConfigError), closing(_connection(host, port)) as connection:
        context.wrap_socket(connection, server_hostname=host).close()
        return f"{host}:{port} speaks TLS: write https://{parts.netloc.rpartition('@')[2]}"
    return ""


def _base_models(url: str, full: str, key: str) -> list[str]:
    """The names that the server lists. Raises ConfigError."""

    def why_none(error: Exception) -> str:
        if isinstance(error, HTTPError) and error.code in (401, 403):
            return f"{url} refuses the API key (HTTP {error.code}): set TINKER_API_KEY to one that it knows"
        why = f"HTTP {error.code}" if isinstance(error, HTTPError) else why_unanswered(error)
        return f"{url} does not list its base models ({why}); see its log"

    with translated((OSError, ValueError, KeyError, TypeError, HTTPException), ConfigError, why_none):
        with open_url(full + _CAPABILITIES, _PATIENCE_S, {"X-API-Key": key} if key else None) as reply:
            content = json.load(reply)
        return [one_line(str(model["model_name"])) for model in content["supported_models"]]


def _field(body: bytes, name: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        found = json.loads(body)[name]
        return found if isinstance(found, str) else ""
    return ""
