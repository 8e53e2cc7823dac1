"""Pages of the console as HTTP answers them: as HTML, as JSON, and as a stream of the parts that change.

A page is a template and a function that fetches its data.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from tinsmith.console.pages import POLICY, Viewer, is_live, render, render_live, static_files
from tinsmith.errors import BackpressureError, TinsmithError, reported
from tinsmith.server.access import admit_still, caller_of
from tinsmith.server.front import Front, front_of
from tinsmith.server.live import MOST_STREAMS
from tinsmith.server.tenants import EVERYONE, Caller

log = logging.getLogger(__name__)

Asked = Mapping[str, str]
"""Parameters of the query and of the path, by name; one that is repeated holds all values, with commas."""
Data = Callable[[Front, Caller, Asked], Awaitable[dict[str, Any]]]
"""Fetches what a page shows, as values that JSON has. Raises errors of `tinsmith/errors.py`."""

LIVE = "/live"
"""Prefix of the paths of streams."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


def add_page(router: APIRouter, path: str, template: str, data: Data, json_path: str = "") -> None:
    """Add a page at `path`, its JSON at `path`.json, and the stream of its parts that change, if it has some.

    The JSON comes first: a parameter at the end of a path would take its suffix in.
    """

    async def as_json(request: Request) -> Response:
        shown = await data(front_of(request), caller_of(request), _asked(request))
        content = await asyncio.to_thread(orjson.dumps, shown, option=orjson.OPT_NON_STR_KEYS)
        return Response(content, 200, _HEADERS, "application/json")

    async def as_html(request: Request) -> Response:
        shown = await data(front_of(request), caller_of(request), _asked(request))
        # A page of many tokens takes a second
        return html_reply(await asyncio.to_thread(render, template, shown, viewer_of(request)))

    async def as_stream(request: Request) -> Response:
        return _stream(request, template, data)

    router.add_api_route(json_path or f"{path}.json", as_json, methods=["GET"])
    if is_live(template):
        router.add_api_route(f"{LIVE}{path}", as_stream, methods=["GET"])
    router.add_api_route(path, as_html, methods=["GET"])


async def warm(front: Front, pages: Iterable[tuple[str, Data]]) -> None:
    """Show these pages to nobody: what is compiled and read for the first time takes a fifth of a second."""
    with reported(TinsmithError, partial(log.info, "the console's first page will take longer: %s")):
        await asyncio.to_thread(static_files)
        for template, data in pages:
            shown = await data(front, EVERYONE, {})
            await asyncio.to_thread(render, template, shown, Viewer("", "", "", "", has_keys=False))


def html_reply(content: str, status: int = 200) -> Response:
    """Return a page, which may load nothing from elsewhere."""
    return Response(content, status, _HEADERS, "text/html; charset=utf-8")


def viewer_of(request: Request) -> Viewer:
    """Return who looks at a page."""
    caller, path = caller_of(request), request.url.path
    if path.startswith(f"{LIVE}/"):
        path = path[len(LIVE) :]
    return Viewer(path, request.url.query, caller.tenant, caller.role, has_keys=caller.key is not None)


def _asked(request: Request) -> Asked:
    given: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        given[name] = f"{given[name]},{value}" if name in given else value
    return given | request.path_params


def _stream(request: Request, template: str, data: Data) -> Response:
    """Raises BackpressureError if too many are open."""
    front, caller, asked, viewer = front_of(request), caller_of(request), _asked(request), viewer_of(request)
    if front.live.count >= MOST_STREAMS:
        raise BackpressureError(f"{MOST_STREAMS} pages are being watched already; close some, or look again later")

    async def compute() -> Mapping[str, str]:
        return await asyncio.to_thread(render_live, template, await data(front, caller, asked), viewer)

    key = viewer, caller.key
    events = front.live.follow(key, compute, partial(admit_still, request))
    return StreamingResponse(events, media_type="text/event-stream", headers=_HEADERS)
