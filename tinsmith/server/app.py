"""The FastAPI application: routes, error replies, and an answer for the parts of the Tinker API that are not built."""

from fastapi import FastAPI, Request, Response

from tinsmith.errors import NotFoundError
from tinsmith.server.hub import Hub
from tinsmith.server.origins import Origins
from tinsmith.server.replies import add_error_replies
from tinsmith.server.routes import catalog, checkpoints, downloads, futures, sampling, service, training

_PREFIX = "/api/v1"


def create_app(hub: Hub) -> FastAPI:
    """The application that serves `hub`."""
    app = FastAPI(title="Tinsmith", openapi_url=None)
    app.state.hub = hub
    app.add_middleware(Origins, listens_on=hub.config.server.host, allowed_hosts=hub.config.server.allowed_hosts)
    add_error_replies(app)
    # Routes are tried in order: those that every step and every sample takes come first.
    for resource in (futures, training, sampling, service, catalog, checkpoints, downloads):
        app.include_router(resource.router, prefix=_PREFIX)
    app.add_api_route("/{path:path}", _not_built, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    return app


async def _not_built(request: Request) -> Response:
    if request.url.path.startswith(f"{_PREFIX}{_PREFIX}/"):
        base_url = str(request.base_url).rstrip("/")
        raise NotFoundError(
            f"{request.url.path} does not exist: the client adds {_PREFIX} to its base_url by itself; "
            f"leave it off, as in base_url={base_url!r}"
        )
    # Not 501, which would be fitting: the SDK sends 5xx again for minutes.
    raise NotFoundError(f"{request.method} {request.url.path} is not built in this version of Tinsmith")
