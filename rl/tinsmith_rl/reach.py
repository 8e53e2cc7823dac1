"""Whether the server can be reached, as the SDK reaches it.

Problems are reported within seconds, before any slow import.

Without this check the SDK would repeat an unanswered request for minutes, silently.
"""

import ipaddress
import json
import logging
import os
import re
import time
from base64 import b64encode
from contextlib import suppress
from http.client import HTTPException, HTTPResponse, InvalidURL
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener, getproxies, proxy_bypass

from tinsmith_rl.config import ServerSection
from tinsmith_rl.errors import ConfigError, printable, shortened

log = logging.getLogger(__name__)

_HEALTH = "/api/v1/healthz"
_TIMEOUT_S = 5.0
"""Maximum seconds of one request."""
_PAUSE_S = 0.5
"""Between two requests to a server that is not ready."""
_STORED_KEYS = Path("~/.tinker/credentials.json")
"""The file in which `tinker auth login` of the SDK stores keys."""


def require_server(server: ServerSection) -> None:
    """Wait until the server is ready, for at most `wait_s` seconds, and log why it is not.

    A proxy that is set is no way to this machine.

    Raises ConfigError: no URL or API key is given, there is no Tinker server at the URL, or it is not ready in time.
    """
    url = (server.url or os.environ.get("TINKER_BASE_URL", "")).rstrip("/")
    _check_url_and_key(url, server.api_key)
    deadline = time.monotonic() + server.wait_s
    logged = ""
    while reason := _why_not_ready(url):
        if time.monotonic() >= deadline:
            shown = _without_user(url)
            raise ConfigError(
                f"server: url={shown!r}: {reason}; start the server, correct the URL, or wait longer with server: "
                f"wait_s={server.wait_s:g}"
            )
        if reason != logged:
            log.warning("waiting for %s: %s", _without_user(url), reason)
            logged = reason
        time.sleep(_PAUSE_S)
    _keep_from_proxy(url)


def _check_url_and_key(url: str, key: str) -> None:
    missing = []
    if not url:
        missing.append(
            "url is empty and TINKER_BASE_URL is not set; give the server's URL, such as http://127.0.0.1:8000"
        )
    elif not url.startswith(("http://", "https://")):
        raise ConfigError(f"server: url={_without_user(url)!r} must begin with http:// or https://")
    if not (
        key
        or os.environ.get("TINKER_API_KEY")
        or os.environ.get("TINKER_CREDENTIAL_CMD")
        or _STORED_KEYS.expanduser().exists()
    ):
        missing.append(
            "api_key is empty and TINKER_API_KEY is not set; Tinsmith takes any key that begins with tml-, "
            "such as tml-anything"
        )
    if missing:
        raise ConfigError(f"server: {'; '.join(missing)}")


def _why_not_ready(url: str) -> str:
    """The reason, or "" if the server is ready. Raises ConfigError if something other than a Tinker server answers."""
    try:
        with _open(url + _HEALTH):
            return ""
    except HTTPError as error:
        if error.code == 404:
            hint = "; leave out /api/v1, which clients add" if url.endswith("/api/v1") else ""
            raise ConfigError(
                f"server: url={_without_user(url)!r} answers 404 to {_HEALTH}: there is no Tinker server{hint}"
            ) from error
        return _detail(error) if error.code >= 500 else ""  # the SDK reports other errors at once, such as a wrong key
    except InvalidURL as error:
        raise ConfigError(
            f"server: url={_without_user(url)!r}: {_why_unanswered(error)}; give a URL such as http://127.0.0.1:8000"
        ) from error
    except (OSError, ValueError, HTTPException) as error:  # no answer, or an answer that is not HTTP
        return f"no answer ({_why_unanswered(error)})"


def _detail(error: HTTPError) -> str:
    """The reason that a server gives for not being ready."""
    try:
        return f"not ready ({_one_line(str(json.load(error)['detail']))})"
    except (ValueError, KeyError, TypeError):  # another body, such as a proxy's page
        return f"not ready (HTTP {error.code})"


def _open(url: str) -> HTTPResponse:
    """The answer to a GET. A server on this machine is asked without a proxy. Raises as `urlopen`."""
    opener = build_opener(ProxyHandler({})) if _is_local(url) else build_opener()
    headers = {}
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    if at:
        name, _, password = user.partition(":")
        headers["Authorization"] = "Basic " + b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    reply: HTTPResponse = opener.open(Request(_without_user(url) if at else url, headers=headers), timeout=_TIMEOUT_S)
    return reply


def _is_local(url: str) -> bool:
    """Whether a URL leads to this machine itself. Raises ValueError for what is no URL."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost" or host.endswith(".localhost")


def _keep_from_proxy(url: str) -> None:
    """Let the SDK in this process reach a server on this machine without a proxy, with which it hangs."""
    parts, proxies = urlsplit(url), getproxies()
    host = parts.hostname or ""
    if _is_local(url) and not proxy_bypass(host) and (proxies.get(parts.scheme) or proxies.get("all")):
        before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{before},{host}" if before else host


def _without_user(url: str) -> str:
    """A URL without user and password, to be shown."""
    return re.sub(r"^([a-z]+://)?.*@", lambda found: found[1] or "", url, flags=re.IGNORECASE | re.DOTALL)


def _why_unanswered(error: Exception) -> str:
    """Describe an error of `_open` or its answer in a line, without URL and key."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, InvalidURL):
        return "the URL, or that of a proxy, makes no sense"
    return "the answer cannot be read" if isinstance(reason, ValueError) else _one_line(str(reason))


def _one_line(text: str) -> str:
    """Return a server's text as a part of one line."""
    return printable(shortened(text.strip(), 500))
