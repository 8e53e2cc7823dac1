"""Routes about the service itself and about sessions."""

import logging
import uuid

from fastapi import APIRouter, Request, Response

from tinsmith.errors import NotFoundError
from tinsmith.server.body import drop_body, read_body
from tinsmith.server.hub import hub_of
from tinsmith.server.replies import GoneError, json_reply
from tinsmith.server.sdk_versions import FLAGS_FOR_OLDER, objection
from tinsmith.store.store import Store
from tinsmith.wire.json_body import parse_json
from tinsmith.wire.service_requests import CreateSessionRequest, FinishSessionRequest, SessionHeartbeatRequest

log = logging.getLogger(__name__)

router = APIRouter()

_TELEMETRY_BYTES = 8 * 2**20
"""Limit of a telemetry body, which is not parsed."""


async def _body(request: Request) -> bytes:
    return await read_body(request, hub_of(request).config.requests.max_json_kib * 1024, "max_json_kib")


@router.get("/livez")
async def livez() -> Response:
    """200: the server process answers. `readyz` says whether it can take work."""
    return json_reply({"status": "ok"})


@router.get("/readyz")
@router.get("/healthz")
async def readyz(request: Request) -> Response:
    """200 while the engine can take work; 503 with the reason while it loads, is restarted, shows no sign of life, or the database is bad.

    `healthz`, which the SDK knows, says the same.
    """
    hub = hub_of(request)
    reason = hub.store.missing() or hub.lifetimes.damage or ("" if hub.engine.is_ready else hub.engine.reason)
    if reason:
        return json_reply({"status": "unavailable", "detail": hub.told(reason)}, 503)
    return json_reply({"status": "ok"} if hub.config.training.trains else {"status": "ok", "detail": "it samples only (--train none)"})


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """Return the optional parts of the protocol that the SDK is to use with this server."""
    config = hub_of(request).config.server
    return json_reply(
        {
            "proto_compress_fwdbwd": True,
            **FLAGS_FOR_OLDER,
            "fwdbwd_max_chunk_len": config.fwdbwd_max_chunk_len,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": True,
        }
    )


@router.post("/client/dynamic_config")
async def client_dynamic_config(request: Request) -> Response:
    """Flags that the SDK reads again from time to time. They say that samples can be cancelled."""
    return json_reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    """The base models."""
    hub = hub_of(request)
    sampleable, trains = hub.config.sampling.sampler != "none", hub.config.training.trains
    models = [
        {
            "model_name": facts.name,
            "max_context_length": facts.advertised_context,
            "trainable": trains and facts.trains,
            "sampleable": sampleable,
        }
        for facts in hub.base_models.all()
    ]
    return json_reply({"supported_models": models})


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accept what the SDK reports about itself, and drop it."""
    await drop_body(request, _TELEMETRY_BYTES)
    return json_reply({"status": "accepted"})


@router.post("/create_session")
async def create_session(request: Request) -> Response:
    """A new session. A client whose version does not work with this server is told so, and the SDK logs that as an error."""
    description = parse_json(CreateSessionRequest, await _body(request))
    session_id = str(uuid.uuid4())
    hub = hub_of(request)
    await hub.store.write(Store.create_session, session_id, description.model_dump())
    hub.lifetimes.began(session_id)
    log.info("session %s begins (SDK %s)", session_id, description.sdk_version)
    told = objection(description.sdk_version)
    return json_reply({"type": "create_session", "session_id": session_id} | ({} if told is None else {"error_message": told}))


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    """A heartbeat of a session. 410 tells its client that the session has ended."""
    heartbeat = parse_json(SessionHeartbeatRequest, await _body(request))
    hub = hub_of(request)
    if not await hub.lifetimes.is_open(heartbeat.session_id):
        raise GoneError(f"session {heartbeat.session_id!r} is finished or does not exist")
    hub.lifetimes.saw_session(heartbeat.session_id)
    return json_reply({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish_session(request: Request, session_id: str) -> Response:
    """End a session: its models are unloaded and its snapshots dropped. Ending it again changes nothing."""
    hub = hub_of(request)
    ending = parse_json(FinishSessionRequest, await _body(request))
    if await hub.store.write(Store.finish_session, session_id, ending.reason.type, ending.detail):
        await hub.end_session(session_id, save=False)
        log.info("session %s is finished (%s)", session_id, ending.reason.type)
    elif await hub.store.read(Store.session, session_id) is None:
        raise NotFoundError(f"session {session_id!r} does not exist")
    return json_reply({})
