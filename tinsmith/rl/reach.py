"""Whether the packages are there and the server can be reached. Problems are reported within seconds, before any slow import.

Without this check the SDK would repeat an unanswered request for minutes, silently.
"""

import importlib.util
import json
import logging
import os
import time
from http.client import HTTPException, InvalidURL
from pathlib import Path
from urllib.error import HTTPError

from tinsmith.config_values import installer
from tinsmith.errors import ConfigError
from tinsmith.http_client import HEALTH, keep_from_proxy, one_line, open_url, why_unanswered, without_user
from tinsmith.rl.config import ServerSection

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
"""Maximum seconds of one request."""
_PAUSE_S = 0.5
"""Between two requests to a server that is not ready."""
_STORED_KEYS = Path("~/.tinker/credentials.json")
"""The file in which `tinker auth login` of the SDK stores keys."""


def require_packages(command: str) -> None:
    """Raise ConfigError if a package is missing that a command of this room needs beside those of a server."""
    absent = [package for package in ("tensorboardX", "tinker") if importlib.util.find_spec(package) is None]
    if absent:
        raise ConfigError(f"{command} needs {' and '.join(absent)}: {installer('rl')}")


def require_server(server: ServerSection) -> None:
    """Wait until the server is ready, for at most `wait_s` seconds, and log why it is not. A proxy that is set is no way to this machine.

    Raises ConfigError: no URL or API key is given, there is no Tinker server at the URL, or it is not ready in time.
    """
    url = (server.url or os.environ.get("TINKER_BASE_URL", "")).rstrip("/")
    _check_url_and_key(url, server.api_key)
    deadline = time.monotonic() + server.wait_s
    logged = ""
    while reason := _why_not_ready(url):
        if time.monotonic() >= deadline:
            shown = without_user(url)
            raise ConfigError(
                f"server: url={shown!r}: {reason}; start the server, correct the URL, or wait longer with server: wait_s={server.wait_s:g}"
            )
        if reason != logged:
            log.warning("waiting for %s: %s", without_user(url), reason)
            logged = reason
        time.sleep(_PAUSE_S)
    keep_from_proxy(url)


def _check_url_and_key(url: str, key: str) -> None:
    missing = []
    if not url:
        missing.append("url is empty and TINKER_BASE_URL is not set; give the server's URL, such as http://127.0.0.1:8000")
    elif not url.startswith(("http://", "https://")):
        raise ConfigError(f"server: url={without_user(url)!r} must begin with http:// or https://")
    if not (key or os.environ.get("TINKER_API_KEY") or os.environ.get("TINKER_CREDENTIAL_CMD") or _STORED_KEYS.expanduser().exists()):
        missing.append("api_key is empty and TINKER_API_KEY is not set; Tinsmith takes any key that begins with tml-, such as tml-anything")
    if missing:
        raise ConfigError(f"server: {'; '.join(missing)}")


def _why_not_ready(url: str) -> str:
    """The reason, or "" if the server is ready. Raises ConfigError if something other than a Tinker server answers."""
    try:
        with open_url(url + HEALTH, _TIMEOUT_S):
            return ""
    except HTTPError as error:
        if error.code == 404:
            hint = "; leave out /api/v1, which clients add" if url.endswith("/api/v1") else ""
            raise ConfigError(f"server: url={without_user(url)!r} answers 404 to {HEALTH}: there is no Tinker server{hint}") from error
        return _detail(error) if error.code >= 500 else ""  # the SDK reports other errors at once, such as a wrong key
    except InvalidURL as error:
        raise ConfigError(
            f"server: url={without_user(url)!r}: {why_unanswered(error)}; give a URL such as http://127.0.0.1:8000"
        ) from error
    except (OSError, ValueError, HTTPException) as error:  # no answer, or an answer that is not HTTP
        return f"no answer ({why_unanswered(error)})"


def _detail(error: HTTPError) -> str:
    """The reason that a server gives for not being ready."""
    try:
        return f"not ready ({one_line(str(json.load(error)['detail']))})"
    except (ValueError, KeyError, TypeError):  # another body, such as a proxy's page
        return f"not ready (HTTP {error.code})"
