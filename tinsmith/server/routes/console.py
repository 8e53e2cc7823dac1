"""The pages of the console, their files, and how people log in."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from tinsmith import __version__
from tinsmith.chat.template import ChatFormat
from tinsmith.console.batches import describe_batch
from tinsmith.console.operations import (
    KINDS,
    STATUSES,
    describe_keys,
    describe_life,
    describe_operation,
    describe_settings,
)
from tinsmith.console.overview import last_errors, overview
from tinsmith.console.pages import STATIC, Viewer, render, short, static_files
from tinsmith.console.rollouts import drawn_curves, link_to
from tinsmith.console.run_files import RunDirectory
from tinsmith.console.runs import (
    MOST_COMPARED,
    SMOOTHING,
    describe_comparison,
    describe_metrics,
    describe_row,
    describe_run,
)
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.server import calls
from tinsmith.server.access import caller_of, require_of
from tinsmith.server.body import read_form
from tinsmith.server.console import Asked, add_page, html_reply
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import LOGIN, ForbiddenError, UnauthorizedError, json_reply
from tinsmith.server.tenants import COOKIE, Caller
from tinsmith.store import catalog
from tinsmith.store.keys import LOGIN_S, list_keys
from tinsmith.store.operations import (
    MOST_SEARCHED,
    find_operation,
    last_metrics,
    list_operations,
    offspring_of,
    origins_of,
    queued_operations,
    read_first_requests,
)
from tinsmith.store.usage import DAY_S, stored_bytes, used_between
from tinsmith.wire.forward_backward import decode_stored
from tinsmith.wire.json_body import parse_query
from tinsmith.wire.service_requests import CurvesQuery, OperationQuery, OperationsQuery, RunsPageQuery

router = APIRouter()
"""Pages, which need a key where there are keys."""
open_router = APIRouter()
"""Files, and the pages on which one logs in and out."""

_FORM_BYTES = 4096
_SHOWN_QUEUED, _SHOWN_ERRORS = 12, 8
_RUNS_A_PAGE, _OPERATIONS_A_PAGE, _CHECKPOINTS = 50, 60, 30
_NO_IMAGES = (b"",) * 10_000
"""Digests of images that are not shown."""
_FOR_EVER = "public, max-age=31536000, immutable"


async def show_overview(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """Describe what the server is doing, and whether it is well."""
    about = await front.ask(calls.overview, caller.sees)
    about["models"] = [each for each in about["models"] if await front.tenants.owns(caller, each["model_id"])]
    about |= {"version": __version__, "base_models": [facts.name for facts in front.base_models.all()]}
    queued = await front.store.read(queued_operations, caller.sees, _SHOWN_QUEUED)
    failed = await front.store.read(list_operations, caller.sees, _SHOWN_ERRORS, status="failed")
    now = time.time()
    used = await front.store.read(used_between, now // DAY_S * DAY_S, now + DAY_S, caller.sees)
    failures = last_errors(failed.operations, about.pop("failed_samples"))[:_SHOWN_ERRORS]
    about["keeps_samples"] = front.config.server.kept_sample_mib > 0
    return overview(about, queued, failures, used)


# ---- Runs


async def show_runs(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """A page of the runs, newest first; or those that are compared."""
    if asked.get("compare"):
        return await _compared(front, caller, asked)
    query = parse_query(RunsPageQuery, asked)
    page = catalog.Page(_RUNS_A_PAGE, query.offset)
    found, total = await front.store.read(catalog.list_runs, page, query.project or None, caller.sees)
    last = await front.store.read(last_metrics, [run.model.model_id for run in found], "forward_backward")
    runs = [describe_row(run, last.get(run.model.model_id)) for run in found]
    pages = {"offset": page.offset, "limit": page.limit, "total": total}
    return {"compared": None, "runs": runs, "project": query.project, **pages, "most_compared": MOST_COMPARED}


async def _compared(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    model_ids = _model_ids(asked["compare"])
    for model_id in model_ids:
        await require_of(front, caller, "run", model_id)
    runs = [await front.store.read(catalog.find_run, model_id) for model_id in model_ids]
    curves = [await front.curves(model_id) for model_id in model_ids]
    return {"compared": describe_comparison(runs, curves), **_drawn_as(asked)}


def _model_ids(text: str) -> list[str]:
    """Raises UserError for other than one to four ids."""
    found = list(dict.fromkeys(each for each in text.split(",") if each))
    if not 1 <= len(found) <= MOST_COMPARED:
        raise UserError(f"compare={text[:300]!r} must name 1 to {MOST_COMPARED} runs, with commas between them")
    return found


def _drawn_as(asked: Asked) -> dict[str, Any]:
    """Read the choices for drawing curves, and list those there are. Raises UserError."""
    query = parse_query(CurvesQuery, {name: asked[name] for name in ("smooth", "scale") if asked.get(name)})
    return {"smooth": query.smooth, "scale": query.scale, "offered": SMOOTHING}


async def show_run(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """One run: configuration, last metrics, checkpoints, lineage."""
    model_id = asked["run_id"]
    run = await front.store.read(catalog.find_run, model_id)
    saved = await front.store.read(catalog.list_run_checkpoints, model_id)
    lineage = (
        await front.store.read(origins_of, model_id),
        await front.store.read(offspring_of, model_id, caller.sees),
    )
    session = await front.store.read(catalog.describe_session, run.model.session_id)
    told = {"display_name": session.display_name, "user_metadata": session.user_metadata or {}}
    curves = await front.curves(model_id)
    described = describe_run(run, told, curves, saved, lineage)
    may_change = caller.role != "read-only" and front.config.training.trains
    if not asked.get("all"):
        described["checkpoints"] = described["checkpoints"][:_CHECKPOINTS]
    rollouts = await _of_rollouts(front, caller, model_id, link_to)
    if rollouts is not None:
        described["metrics"] = describe_metrics([curves], rollouts["curves"])
    return described | _drawn_as(asked) | {"may_change": may_change, "rollouts": rollouts}


async def _of_rollouts(
    front: Front, caller: Caller, model_id: str, describe: Callable[[RunDirectory], dict[str, Any]]
) -> dict[str, Any] | None:
    """What is to be said of the run of `tinsmith rl` that trains a model. Only admins see files of runs."""
    files = front.run_files
    if caller.sees is not None or files is None:
        return None

    def look() -> dict[str, Any] | None:
        with suppress(UserError, OSError):  # such as of a file that is too large: its own page says so
            run = files.of_model(model_id)
            return None if run is None else describe(run)
        return None

    return await asyncio.to_thread(look)


async def show_batches(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """The first batches of a run, as its model saw them."""
    model_id = asked["run_id"]
    run = await front.store.read(catalog.find_run, model_id)
    kept = await front.store.read(read_first_requests, model_id)
    most = front.config.server.kept_first_passes
    shown: dict[str, Any] = {"model_id": model_id, "most": most, "batches": [], "untold": ""}
    if kept:
        try:
            chat = await front.applications.format_of(front.base_models.find(run.model.base_model))
            shown["batches"] = await asyncio.to_thread(_described, kept, chat)
        except TinsmithError as error:  # such as a base model that is not served any more
            shown["untold"] = front.told(str(error))
    return shown


def _described(kept: list[tuple[int, bytes]], chat: ChatFormat) -> list[dict[str, Any]]:
    def decode(token: int) -> str:
        return chat.tokenizer.decode([token], skip_special_tokens=False)

    return [describe_batch(seq_id, decode_stored(payload, _NO_IMAGES), decode) for seq_id, payload in kept]


@router.get("/curves.json")
async def curves(request: Request) -> Response:
    """The curves of one to four runs, downsampled, for charts."""
    front, caller = front_of(request), caller_of(request)
    model_ids = _model_ids(request.query_params.get("runs", ""))
    smooth = _drawn_as(request.query_params)["smooth"]
    for model_id in model_ids:
        await require_of(front, caller, "run", model_id)
    found = [await front.curves(model_id) for model_id in model_ids]
    drawn = [await asyncio.to_thread(each.drawn, smooth) for each in found]
    written = [
        await _of_rollouts(front, caller, model_id, partial(drawn_curves, smoothing=smooth)) or {}
        for model_id in model_ids
    ]
    runs = [
        {"model_id": model_id, "name": short(model_id), "steps": each.steps, "curves": own | more}
        for model_id, each, own, more in zip(model_ids, found, drawn, written, strict=True)
    ]
    metrics = describe_metrics(found, [name for more in written for name in more])
    return json_reply({"runs": runs, "metrics": metrics}, headers={"Cache-Control": "no-store"})


# ---- Operations


async def show_operations(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """The log, newest first."""
    query = parse_query(OperationsQuery, asked)
    if query.run:
        await require_of(front, caller, "run", query.run)
    wanted = query.before, query.run or None, query.kind or None, query.status or None
    found = await front.store.read(list_operations, caller.sees, _OPERATIONS_A_PAGE, *wanted)
    return {
        "operations": [describe_operation(each) for each in found.operations],
        "older": found.older,
        "most_searched": MOST_SEARCHED,
        "asked": {"status": query.status, "kind": query.kind, "run": query.run},
        "statuses": STATUSES,
        "kinds": KINDS,
        "is_admin": caller.sees is None,
    }


async def show_operation(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """One operation, with what computed it as far as that is known."""
    seq_id = parse_query(OperationQuery, {"seq_id": asked["seq_id"]}).seq_id
    found = await front.store.read(find_operation, asked["run_id"], seq_id)
    return describe_life(found, await front.ask(calls.spans_of, found.request_id))


async def show_settings(front: Front, caller: Caller, asked: Asked) -> dict[str, Any]:
    """Settings in force, and the keys with what is used of their budgets; for admins."""
    if caller.sees is not None:
        raise ForbiddenError("the settings, and the keys of all tenants, need a key of an admin")
    now = time.time()
    used = await front.store.read(used_between, now // DAY_S * DAY_S, now + DAY_S, None)
    keys = describe_keys(await front.store.read(list_keys), used, await front.store.read(stored_bytes), now)
    return {"settings": describe_settings(front.config), "keys": keys}


FIRST_PAGES = (("overview.html.jinja", show_overview), ("runs.html.jinja", show_runs))
"""Those that people open first."""
add_page(router, "/", "overview.html.jinja", show_overview, "/overview.json")
add_page(router, "/runs", "runs.html.jinja", show_runs)
add_page(router, "/runs/{run_id}/batches", "batches.html.jinja", show_batches)
add_page(router, "/runs/{run_id}", "run.html.jinja", show_run)
add_page(router, "/operations", "operations.html.jinja", show_operations)
add_page(router, "/operations/{run_id}/{seq_id}", "operation.html.jinja", show_operation)
add_page(router, "/settings", "settings.html.jinja", show_settings)


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
        cookie = await front.tenants.log_in(caller.key)
        reply.set_cookie(COOKIE, cookie, LOGIN_S, httponly=True, secure=secure, samesite="strict")
    return reply


@open_router.post("/logout")
async def log_out(request: Request) -> Response:
    """End the login, and with it every copy of its cookie."""
    await front_of(request).tenants.log_out(request.headers)
    reply = RedirectResponse(LOGIN, 303)
    reply.delete_cookie(COOKIE)
    return reply


def _login_page(place: str, refusal: str, status: int = 200) -> Response:
    viewer = Viewer(LOGIN, "", "", "", has_keys=False)
    return html_reply(render("login.html.jinja", {"next": place, "refusal": refusal}, viewer), status)


def _local(place: str) -> str:
    """A place on this server: what leads elsewhere becomes the first page."""
    if not place.startswith("/") or place.startswith(("//", "/\\")):
        return "/"
    with suppress(ValueError):  # such as of an address that is none
        parts = urlsplit(place)
        if not parts.scheme and not parts.netloc:
            return quote(place, safe="/?&=%:,.~-_+")
    return "/"
