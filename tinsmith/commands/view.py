"""`tinsmith view`: the console's pages on rollouts, for the files of runs, without a server for Tinker clients."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from tinsmith.console.pages import POLICY, STATIC, Viewer, render, static_files
from tinsmith.console.rollouts import IMAGE_PATH, PAGES, ROLLOUTS, Asked
from tinsmith.console.run_files import Json, RunFiles
from tinsmith.errors import ConfigError, NotFoundError, TinsmithError, translated

_HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
_OWN = {"navigation": ((ROLLOUTS, "Rollouts"),), "has_playground": False}
"""Values for templates, which have no links to the console's other pages here."""


def view(directory: Path, port: int, server: str, tell: Callable[[str], None]) -> None:
    """Serve the pages on this machine until Ctrl-C, and `tell` where. Links to chats lead to `server`.

    Raises ConfigError for a directory that is none, and for a port that is taken.
    """
    if not directory.is_dir():
        raise ConfigError(f"DIR={str(directory)!r} is no directory; name the one that a run writes, or one above it")
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken = f"--port {port} is taken on 127.0.0.1; take another, or 0 for any that is free"
        with translated(OSError, ConfigError, lambda _: taken):
            listening.bind(("127.0.0.1", port))
            listening.listen()  # a browser may come as soon as the address is told
        tell(f"http://127.0.0.1:{listening.getsockname()[1]} shows {directory}; Ctrl-C ends it")
        config = uvicorn.Config(view_app(RunFiles(directory, server)), lifespan="off", log_level="warning", ws="none")
        asyncio.run(uvicorn.Server(config).serve([listening]))


def view_app(files: RunFiles) -> Starlette:
    """The pages as an application."""
    routes = [Route("/", _start(files)), Route(f"{STATIC}{{name}}", _static), Route(IMAGE_PATH, _image(files))]
    for path, template, data in PAGES:
        # The JSON comes first: a parameter at the end of a path would take its suffix in
        routes += [Route(f"{path}.json", _json(files, data)), Route(path, _page(files, template, data))]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts], exception_handlers={TinsmithError: _refused, 404: _refused})


def _start(files: RunFiles) -> Callable[[Request], Response]:
    def start(_: Request) -> Response:
        runs = files.runs()
        return RedirectResponse(f"{ROLLOUTS}/{runs[0].name}" if len(runs) == 1 else ROLLOUTS)

    return start


def _json(files: RunFiles, data: Callable[[RunFiles, Asked], Json]) -> Callable[[Request], Response]:
    def as_json(request: Request) -> Response:
        shown = data(files, _asked(request))
        return Response(orjson.dumps(shown, option=orjson.OPT_NON_STR_KEYS), 200, _HEADERS, "application/json")

    return as_json  # in a thread, as it is no coroutine


def _page(files: RunFiles, template: str, data: Callable[[RunFiles, Asked], Json]) -> Callable[[Request], Response]:
    def as_html(request: Request) -> Response:
        return _html(request, template, data(files, _asked(request)))

    return as_html


def _image(files: RunFiles) -> Callable[[Request], Response]:
    def image(request: Request) -> Response:
        place = files.run(request.path_params["run"]).image(request.path_params["name"])
        return FileResponse(place, headers={**_HEADERS, "Cache-Control": "max-age=31536000, immutable"})

    return image


def _static(request: Request) -> Response:
    file = static_files().get(request.path_params["name"])
    if file is None:
        raise NotFoundError(f"{request.url.path} does not exist")
    return Response(file.content, 200, _HEADERS, file.media_type)


def _refused(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, TinsmithError) and not isinstance(error, NotFoundError) else 404
    told = str(error) if isinstance(error, TinsmithError) else f"{request.url.path} does not exist"
    if request.url.path.endswith(".json"):
        return Response(orjson.dumps({"detail": told}), status, _HEADERS, "application/json")
    return _html(request, "error.html.jinja", {"status": status, "told": told}, status)


def _html(request: Request, template: str, data: Json, status: int = 200) -> Response:
    viewer = Viewer(request.url.path, request.url.query, tenant="", role="", has_keys=False)
    return Response(render(template, data | _OWN, viewer), status, _HEADERS, "text/html; charset=utf-8")


def _asked(request: Request) -> Asked:
    return {**request.query_params, **request.path_params}
