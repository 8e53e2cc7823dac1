"""`/metrics`, for Prometheus: to programs on this machine, and to all at `metrics_address`."""

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tinsmith.errors import NotFoundError
from tinsmith.server import calls
from tinsmith.server.front import Front, comes_from_here, front_of
from tinsmith.server.replies import add_error_replies

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All numbers. Anybody may have them at an address of their own, others on this machine only."""
    front = front_of(request)
    if not (request.app.state.is_for_metrics or comes_from_here(request)):
        raise NotFoundError("/metrics is answered on the server's machine; --metrics-address gives it an address")
    return Response(await front.ask(calls.metrics), media_type=CONTENT_TYPE_LATEST)


def metrics_app(front: Front) -> FastAPI:
    """The application at `metrics_address`, which has nothing else."""
    app = FastAPI(openapi_url=None)
    app.state.front, app.state.is_for_metrics = front, True
    add_error_replies(app)
    app.include_router(router)
    return app
