"""`/metrics`, for Prometheus: to programs on this machine, and to all at `metrics_address`."""

import time

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tinsmith.errors import NotFoundError
from tinsmith.observing.metrics import ENGINE_READY, PENDING_SAMPLE_AGE, PENDING_SAMPLES, POLLS, QUEUED_BYTES
from tinsmith.server.hub import Hub, comes_from_here, hub_of
from tinsmith.server.replies import add_error_replies

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All numbers. Anybody may have them at an address of their own, others on this machine only."""
    hub = hub_of(request)
    if not (request.app.state.is_for_metrics or comes_from_here(request)):
        raise NotFoundError("/metrics is answered on the server's machine; --metrics-address gives it an address")
    _look(hub)
    return Response(hub.activity.text(), media_type=CONTENT_TYPE_LATEST)


def metrics_app(hub: Hub) -> FastAPI:
    """The application at `metrics_address`, which has nothing else."""
    app = FastAPI(openapi_url=None)
    app.state.hub, app.state.is_for_metrics = hub, True
    add_error_replies(app)
    app.include_router(router)
    return app


def _look(hub: Hub) -> None:
    """Note what changes with every request, and is known at once."""
    sequences, since = hub.samples.unfinished
    ENGINE_READY.set(hub.engine.is_ready)
    POLLS.set(hub.waiters.count)
    PENDING_SAMPLES.set(sequences)
    PENDING_SAMPLE_AGE.set(0.0 if since is None else time.monotonic() - since)
    QUEUED_BYTES.set(hub.queued.size)
