"""Opens URLs of a Tinker server as the SDK does: with proxy, user and password."""

import ipaddress
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPResponse, InvalidURL
from urllib.error import URLError
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener, getproxies, proxy_bypass

from tinsmith.errors import printable, shortened

HEALTH = "/api/v1/healthz"


def is_local(url: str) -> bool:
    """Whether a URL leads to this machine itself. Raises ValueError for what is no URL."""
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host == "localhost" or host.endswith(".localhost")


def open_url(url: str, timeout_s: float, headers: Mapping[str, str] | None = None) -> HTTPResponse:
    """The answer to a GET. A server on this machine is asked without a proxy. Raises as `urlopen`."""
    opener = build_opener(ProxyHandler({})) if is_local(url) else build_opener()
    sent = dict(headers or {})
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    if at:
        name, _, password = user.partition(":")
        sent["Authorization"] = "Basic " + b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    reply: HTTPResponse = opener.open(Request(without_user(url) if at else url, headers=sent), timeout=timeout_s)
    return reply


def without_user(url: str) -> str:
    """A URL without user and password, to be shown."""
    return re.sub(r"^([a-z]+://)?.*@", lambda found: found[1] or "", url, flags=re.IGNORECASE | re.DOTALL)


def why_unanswered(error: Exception) -> str:
    """Describe an error of `open_url` or its answer in a line, without URL and key."""
    reason = error.reason if isinstance(error, URLError) else error
    if isinstance(reason, InvalidURL):
        return "the URL, or that of a proxy, makes no sense"
    return "the answer cannot be read" if isinstance(reason, ValueError) else one_line(str(reason))


def one_line(text: str) -> str:
    """Return a server's text as a part of one line."""
    return printable(shortened(text.strip(), 500))


def keep_from_proxy(url: str) -> None:
    """Let the SDK in this process reach a server on this machine without a proxy, with which it hangs."""
    if misled_by(url):
        before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        host = urlsplit(url).hostname or ""
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{before},{host}" if before else host


def misled_by(url: str) -> str:
    """The proxy to which the SDK would send what is for this machine, or ""."""
    return proxy_of(urlsplit(url)) if is_local(url) else ""


def proxy_of(parts: SplitResult) -> str:
    """The proxy for such a URL, or ""."""
    proxies = getproxies()
    return "" if proxy_bypass(parts.hostname or "") else proxies.get(parts.scheme) or proxies.get("all") or ""
