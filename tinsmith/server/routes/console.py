"""The pages of the console, their files, and how people log in."""

import time
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from tinsmith import __version__
from tinsmith.console.overview import overview
from tinsmith.console.pages import STATIC, Viewer, render, static_files
from tinsmith.errors import NotFoundError
from tinsmith.server import calls
from tinsmith.server.body import read_form
from tinsmith.server.console import Asked, add_page, html_reply
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import LOGIN, UnauthorizedError
from tinsmith.server.signatures import COOKIE, LOGIN_S
from tinsmith.server.tenants import Caller
from tinsmith.store.operations import failed_operations, queued_operations
from tinsmith.store.usage import DAY_S, used_between

router = APIRouter()
"""Pages, which need a key where there are keys."""
open_router = APIRouter()
"""Files, and the pages on which one logs in and out."""

_FORM_BYTES = 4096
_SHOWN_QUEUED, _SHOWN_ERRORS = 12, 8
_FOR_EVER = "public, max-age=31536000, immutable"


async def show_overview(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """Describe what the server is doing, and whether it is well."""
    about = await front.ask(calls.overview)
    about["models"] = [each for each in about["models"] if await front.tenants.owns(caller, each["model_id"])]
    about |= {"version": __version__, "base_models": [facts.name for facts in front.base_models.all()]}
    queued = await front.store.read(queued_operations, caller.sees, _SHOWN_QUEUED)
    failed = await front.store.read(failed_operations, caller.sees, _SHOWN_ERRORS)
    now = time.time()
    used = await front.store.read(used_between, now // DAY_S * DAY_S, now + DAY_S, caller.sees)
    return overview(about, queued, failed, used)


add_page(router, "/", "overview.html.jinja", show_overview, "/overview.json")


# ---- Files and logins


@open_router.get(f"{STATIC}{{name}}")
async def static_file(request: Request, name: str) -> Response:
    """A script or a style, which the browser may keep: its URL changes with its content."""
    file = static_files().get(name)
    if file is None:
        raise NotFoundError(f"{request.url.path} does not exist")
    headers = {"Cache-Control": _FOR_EVER, "Vary": "Accept-Encoding", "X-Content-Type-Options": "nosniff"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, 200, headers | {"Content-Encoding": "gzip"}, file.media_type)
    return Response(file.content, 200, headers, file.media_type)


@open_router.get(LOGIN)
async def login_page(request: Request) -> Response:
    """A form that asks for a key."""
    return _login_page(_local(request.query_params.get("next", "/")), "")


@open_router.post(LOGIN)
async def log_in(request: Request) -> Response:
    """Give the browser a cookie for a key, which scripts cannot read and other sites cannot send."""
    form = parse_qs((await read_form(request, _FORM_BYTES)).decode("utf-8", "replace"))
    key, place = form.get("key", [""])[0].strip(), _local(form.get("next", ["/"])[0])
    front = front_of(request)
    try:
        caller = await front.tenants.caller({"x-api-key": key})
    except UnauthorizedError:
        return _login_page(place, "This server does not know that key, or it has expired.", 401)
    reply = RedirectResponse(place, 303)
    if caller.key is not None:
        secure = request.url.scheme == "https"
        cookie = front.logins.cookie(caller.key.key_id)
        reply.set_cookie(COOKIE, cookie, LOGIN_S, httponly=True, secure=secure, samesite="strict")
    return reply


@open_router.post("/logout")
async def log_out(request: Request) -> Response:
    """Take the cookie back."""
    reply = RedirectResponse(LOGIN, 303)
    reply.delete_cookie(COOKIE)
    return reply


def _login_page(place: str, refusal: str, status: int = 200) -> Response:
    viewer = Viewer(LOGIN, "", "", "", has_keys=False)
    return html_reply(render("login.html.jinja", {"next": place, "refusal": refusal}, viewer), status)


def _local(place: str) -> str:
    """A place on this server: what leads elsewhere becomes the first page."""
    parts = urlsplit(place)
    is_local = not parts.scheme and not parts.netloc and place.startswith("/") and not place.startswith(("//", "/\\"))
    return quote(place, safe="/?&=%:,.~-_+") if is_local else "/"
