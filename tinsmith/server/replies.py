"""HTTP replies: results as JSON or protobuf, and exceptions as a status with {"detail": ...}.

An error gets the status that makes the SDK do the right thing: it repeats a request for minutes after 408, 409, 429 and
5xx, submits a sample again after 410, and raises any other at once. Directories of the server are for the log alone; an
error of the request is told as it is.
"""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import orjson
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse

from tinsmith.console.pages import POLICY, Viewer, render
from tinsmith.errors import (
    BackpressureError,
    EngineUnavailableError,
    NotFoundError,
    ParameterError,
    StoreUnavailableError,
    TinsmithError,
    UserError,
)
from tinsmith.wire.compression import TooLargeError

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""Seconds after which to repeat what was answered 503 for the database; 429 has its own.

The SDK obeys up to 60; its samples pause 1 or 5 s after 429, whatever this says.
"""

PROTOBUF = "application/x-protobuf"


class GoneError(UserError):
    """Something has ended that the client may start again (HTTP 410)."""


class UnauthorizedError(UserError):
    """The request has no API key that is valid here (HTTP 401)."""


class ForbiddenError(UserError):
    """The key does not allow this, or a URL was not signed by this server or has expired (HTTP 403)."""


_STATUS: tuple[tuple[type[TinsmithError], int], ...] = (
    (GoneError, 410),
    (UnauthorizedError, 401),
    (ForbiddenError, 403),
    (NotFoundError, 404),
    (TooLargeError, 413),
    (UserError, 400),
    (BackpressureError, 429),
    (StoreUnavailableError, 503),
    (EngineUnavailableError, 503),
    (TinsmithError, 500),
)
"""The first class that fits decides."""


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(orjson.dumps(content), status, headers, "application/json")


def protobuf_reply(content: bytes) -> Response:
    """An encoded protobuf message."""
    return Response(content, media_type=PROTOBUF)


def future_reply(request_id: str, **more: Any) -> Response:
    """The answer to a submitted operation: what to poll for."""
    return json_reply({"request_id": request_id, **more})


def failed_reply(error: str, category: str) -> Response:
    """The outcome of a failed operation: a final answer to the SDK, so with status 200."""
    return json_reply({"error": error, "category": category})


def add_error_replies(app: FastAPI) -> None:
    """Make `app` answer every exception with {"detail": ...}."""
    app.add_exception_handler(TinsmithError, _reply_to_known)
    app.add_exception_handler(ClientDisconnect, _reply_to_disconnect)
    app.add_exception_handler(Exception, _reply_to_unknown)


async def _reply_to_known(request: Request, error: Exception) -> Response:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    headers = None
    if isinstance(error, BackpressureError | StoreUnavailableError):
        wait_s = error.retry_after_s if isinstance(error, BackpressureError) else RETRY_AFTER_S
        headers = {"Retry-After": str(math.ceil(wait_s))}
    await request.app.state.front.refused(_reason_of(error), status)
    if _asks_for_page(request):
        return _page_of(request, error, status, headers)
    return json_reply(_in_form(request, error), status, headers)


def _in_form(request: Request, error: Exception) -> dict[str, Any]:
    """An error in the form of the API that the client speaks."""
    path = request.url.path
    if path.startswith(tuple(f"{prefix}/" for prefix in OPENAI_PREFIXES)):
        return openai_error(request, error)
    return anthropic_error(request, error) if path.startswith(ANTHROPIC_PREFIX) else {"detail": _told(request, error)}


def _told(request: Request, error: Exception) -> str:
    told: str = request.app.state.front.told(str(error), "user" if isinstance(error, UserError) else "server")
    return told


LOGIN = "/login"


def _asks_for_page(request: Request) -> bool:
    """Whether a person looks at a page of the console, whose errors are pages too."""
    has_page = request.method == "GET" or request.url.path == LOGIN
    wants_html = has_page and "text/html" in request.headers.get("accept", "")
    return wants_html and not request.url.path.startswith(("/api/", "/oai/", "/v1/", "/anthropic/"))


def _page_of(request: Request, error: Exception, status: int, headers: Mapping[str, str] | None) -> Response:
    if isinstance(error, UnauthorizedError) and not request.app.state.is_for_metrics:
        place = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{LOGIN}?{urlencode({'next': place})}", 303)
    viewer = Viewer(request.url.path, "", "", "", has_keys=False)
    shown = {"status": status, "told": _told(request, error), "is_away": isinstance(error, StoreUnavailableError)}
    content = render("error.html.jinja", shown, viewer)
    more = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
    return Response(content, status, {**more, **(headers or {})}, "text/html; charset=utf-8")


OPENAI_PREFIXES = ("/v1", "/oai/api/v1")
"""Beginnings of the paths of OpenAI's API: its own, and hosted Tinker's."""
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


def openai_error(request: Request, error: Exception) -> dict[str, Any]:
    """An error in the form of OpenAI's API, which names the parameter that is wrong."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    parameter, code = error.parameter if isinstance(error, ParameterError) else None, _reason_of(error)
    if isinstance(error, NotFoundError) and request.url.path.endswith("/completions"):
        parameter, code = "model", "model_not_found"  # nothing else is looked up there
    kind = _OPENAI_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": _told(request, error), "type": kind, "param": parameter, "code": code}}


ANTHROPIC_PREFIX = "/anthropic/api/v1"
"""The beginning of the paths of Anthropic's API."""
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def anthropic_error(request: Request, error: Exception) -> dict[str, Any]:
    """An error in the form of Anthropic's API."""
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _told(request, error)}}


def _reason_of(error: Exception) -> str:
    """Return the class of an error as a label: `backpressure` for a BackpressureError."""
    words = re.findall("[A-Z][a-z]*", type(error).__name__.removesuffix("Error"))
    return "_".join(words).lower()


async def _reply_to_disconnect(request: Request, _error: Exception) -> Response:
    log.info("the client of %s went away before its request was complete", request.url.path)
    return Response(status_code=400)


async def _reply_to_unknown(request: Request, error: Exception) -> Response:
    await request.app.state.front.refused("internal", 500)
    # The traceback is in the server's log: the web framework raises the exception again after this reply.
    detail = f"internal error of the server: {type(error).__name__}; see its log"
    return json_reply(_in_form(request, TinsmithError(detail)), 500)
