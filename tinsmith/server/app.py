"""The FastAPI application: routes, error replies, and an answer for the parts of the Tinker API that are not built.

And uvicorn around it.
"""

import contextlib
import gc
import logging
import math
from collections.abc import Iterator

import uvicorn
from fastapi import Depends, FastAPI, Request, Response

from tinsmith.config import ServerConfig
from tinsmith.errors import NotFoundError
from tinsmith.server.access import PREFIX, admit
from tinsmith.server.front import Front
from tinsmith.server.http_protocol import Origins, http_protocol
from tinsmith.server.replies import add_error_replies
from tinsmith.server.routes import (
    applications,
    catalog,
    checkpoints,
    console,
    console_samples,
    downloads,
    futures,
    messages,
    metrics,
    sampling,
    service,
    training,
    uploads,
    usage,
)

_YOUNG_COLLECTIONS = 1000
"""Collections of young objects for one of all, which finds nothing as a rule, and stops the event loop for a second
while 8,192 polls wait."""
_HTTP_GRACE_S = 2
"""Seconds for replies once the server stops."""


def create_app(front: Front) -> FastAPI:
    """The application that serves `front`."""
    app = FastAPI(title="Tinsmith", openapi_url=None)
    app.state.front, app.state.is_for_metrics = front, False
    app.add_middleware(Origins, listens_on=front.config.server.host, allowed_hosts=front.config.server.allowed_hosts)
    add_error_replies(app)
    # Routes are tried in order: those that every step and every sample takes come first.
    for routes in (futures, training, sampling, service, catalog, checkpoints, downloads, uploads, usage):
        app.include_router(routes.router, prefix=PREFIX, dependencies=[Depends(admit)])
    app.include_router(applications.router, dependencies=[Depends(admit)])
    app.include_router(messages.router, dependencies=[Depends(admit)])
    app.include_router(metrics.router)
    app.include_router(console.open_router)
    app.include_router(console.router, dependencies=[Depends(admit)])
    app.include_router(console_samples.router, dependencies=[Depends(admit)])
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    app.add_api_route("/{path:path}", _not_built, methods=methods, dependencies=[Depends(admit)])
    return app


async def _not_built(request: Request) -> Response:
    if request.url.path.rfind(f"{PREFIX}/") > 0 and not request.url.path.startswith(("/oai/", "/anthropic/")):
        base_url = str(request.base_url).rstrip("/")
        raise NotFoundError(
            f"{request.url.path} does not exist: the client adds {PREFIX} to its base_url by itself; "
            f"leave out what stands before, as in base_url={base_url!r}"
        )
    # Not 501, which would be fitting: the SDK sends 5xx again for minutes.
    raise NotFoundError(f"{request.method} {request.url.path} is not built in this version of Tinsmith")


def collect_seldom() -> None:
    """Keep the garbage collector from what is there now, and mostly from what stays."""
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _YOUNG_COLLECTIONS)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before the engine."""

    def end(self, at_once: bool = False) -> None:
        """Accept nothing more, and let `serve` return once the replies are out."""
        self.should_exit = True
        self.force_exit |= at_once

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(app: FastAPI, server: ServerConfig) -> uvicorn.Config:
    """The uvicorn configuration for an application."""
    return uvicorn.Config(
        app,
        http=http_protocol(server.max_header_kib, server.connection_idle_s),
        ws="none",
        # Behind a proxy on this machine clients have an address each. A process here may lie, but can keep the
        # processors busy anyway.
        forwarded_allow_ips=["127.0.0.1", "::1", *server.trusted_proxies],
        ssl_certfile=server.tls_cert or None,
        ssl_keyfile=server.tls_key or None,
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level=logging.WARNING,
        timeout_keep_alive=math.ceil(server.connection_idle_s),
        timeout_graceful_shutdown=_HTTP_GRACE_S,
    )
