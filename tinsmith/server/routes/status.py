"""Status of the server, for people. Not part of the Tinker API."""

from fastapi import APIRouter, Request, Response

from tinsmith import __version__
from tinsmith.server.hub import hub_of
from tinsmith.server.replies import json_reply

router = APIRouter()


@router.get("/status")
async def status(request: Request) -> Response:
    """The engine's state, whether it trains, base models, loaded models, samples, tokens per second of a minute, the engine's memory."""
    hub = hub_of(request)
    bases = [
        {"name": facts.name, "architecture": facts.architecture, "max_context": facts.max_context, "takes_images": facts.takes_images}
        for facts in (hub.base_models.all() if hub.engine.takes_messages else [])
    ]
    engine = {"state": hub.engine.state, "reason": hub.told(hub.engine.reason), "busy_s": hub.engine.busy_s}
    trains = hub.config.training.trains
    return json_reply({"version": __version__, "engine": engine, "trains": trains, "base_models": bases, **hub.activity.describe()})
