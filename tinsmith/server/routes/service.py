"""The service itself, beginning and end of sessions, and what only a hosted service has."""

import logging
import uuid
from contextlib import suppress

from fastapi import APIRouter, Request, Response
from packaging.version import InvalidVersion, Version

from tinsmith import __version__
from tinsmith.errors import NotFoundError
from tinsmith.server import calls
from tinsmith.server.access import caller_of, operation_body, owned
from tinsmith.server.body import drop_body
from tinsmith.server.front import front_of
from tinsmith.server.replies import ForbiddenError, GoneError, json_reply
from tinsmith.wire.json_body import parse_json, parse_query
from tinsmith.wire.service_requests import (
    CreateSessionRequest,
    FinishSessionRequest,
    SessionHeartbeatRequest,
    TraceQuery,
)

log = logging.getLogger(__name__)

router = APIRouter()

OLDEST = "0.22.3"
"""The first SDK that can send every forward pass in protobuf."""
NEWEST = "0.38.0"
"""The newest SDK that was tested."""
_MOST_NOTED = 100
_noted: set[str] = set()
"""SDK versions that do not work, or were not tested, and that the log has named."""

FLAGS_FOR_OLDER = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True, "create_model_via_load_weights": True}
"""Flags for what SDKs from 0.25.0 on do anyway: passes in protobuf, one request to create a model from a checkpoint."""

_TELEMETRY_BYTES = 8 * 2**20
"""Limit of a telemetry body, which is not parsed."""


@router.get("/livez")
async def livez() -> Response:
    """200: the server process answers. `readyz` says whether it can take work."""
    return json_reply({"status": "ok"})


@router.get("/readyz")
@router.get("/healthz")
async def readyz(request: Request) -> Response:
    """200 while the engine can take work, else 503 with the reason. `healthz`, which the SDK knows, says the same."""
    front = front_of(request)
    if reason := await front.ask(calls.unready):
        return json_reply({"status": "unavailable", "detail": front.told(reason)}, 503)
    return json_reply(
        {"status": "ok"}
        if front.config.training.trains
        else {"status": "ok", "detail": "it samples only (--train none)"}
    )


@router.post("/client/config")
async def client_config(request: Request) -> Response:
    """The optional parts of the protocol that the SDK is to use."""
    config = front_of(request).config.server
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
    """Flags that the SDK reads from time to time: samples can be cancelled."""
    return json_reply({"refresh_interval_sec": 300, "sample_cancel_enabled": True})


@router.get("/get_server_capabilities")
async def get_server_capabilities(request: Request) -> Response:
    """The base models that the caller may use."""
    front, key = front_of(request), caller_of(request).key
    allowed = None if key is None else key.models
    sampleable, trains = front.config.sampling.sampler != "none", front.config.training.trains
    models = [
        {
            "model_name": facts.name,
            "max_context_length": facts.advertised_context,
            "trainable": trains and facts.trains,
            "sampleable": sampleable,
        }
        for facts in front.base_models.all()
        if allowed is None or facts.name in allowed
    ]
    return json_reply({"supported_models": models})


@router.post("/telemetry")
async def telemetry(request: Request) -> Response:
    """Accept what the SDK reports about itself, and drop it."""
    await drop_body(request, _TELEMETRY_BYTES)
    return json_reply({"status": "accepted"})


@router.post("/create_session")
async def create_session(request: Request) -> Response:
    """A new session. `error_message` names an SDK version that does not work here; the SDK logs it."""
    description = parse_json(CreateSessionRequest, await operation_body(request))
    session_id = str(uuid.uuid4())
    front = front_of(request)
    caller = caller_of(request)
    about = description.model_dump()
    if caller.key is not None and description.project_id is None:
        about["project_id"] = caller.key.project_id
    await front.ask(calls.begin_session, session_id, about, caller.tenant)
    log.info("session %s begins (SDK %s)", session_id, description.sdk_version, extra={"session": session_id})
    told = _objection(description.sdk_version)
    if told is not None and description.sdk_version not in _noted and len(_noted) < _MOST_NOTED:
        _noted.add(description.sdk_version)
        log.warning("session %s: %s", session_id, told)
    return json_reply(
        {"type": "create_session", "session_id": session_id} | ({} if told is None else {"error_message": told})
    )


@router.post("/session_heartbeat")
async def session_heartbeat(request: Request) -> Response:
    """Note a heartbeat; 410 tells a client that its session has ended."""
    heartbeat = await owned(request, parse_json(SessionHeartbeatRequest, await operation_body(request)))
    if not await front_of(request).ask(calls.heartbeat, heartbeat.session_id):
        raise GoneError(f"session {heartbeat.session_id!r} is finished or does not exist")
    return json_reply({"type": "session_heartbeat"})


@router.post("/sessions/{session_id}/finish")
async def finish_session(request: Request, session_id: str) -> Response:
    """End a session: unload its models, drop its snapshots. Ending it again changes nothing."""
    front = front_of(request)
    ending = parse_json(FinishSessionRequest, await operation_body(request))
    await front.session(session_id)
    if await front.ask(calls.finish_session, session_id, ending.reason.type, ending.detail):
        log.info("session %s is finished (%s)", session_id, ending.reason.type, extra={"session": session_id})
    return json_reply({})


def _objection(sdk_version: str) -> str | None:
    """A warning for clients of this version; None if it works, or is no version."""
    with suppress(InvalidVersion):
        release = Version(Version(sdk_version).base_version)  # without a suffix such as rc1
        if not Version(OLDEST) <= release <= Version(NEWEST):
            too_old = release < Version(OLDEST)
            fault = (
                "is too old for this server: training will fail"
                if too_old
                else "is newer than what this server was tested with"
            )
            return f"tinker {sdk_version} {fault}. It works with {OLDEST} to {NEWEST}; pip install tinker=={NEWEST}"
    return None


@router.get("/status")
async def status(request: Request) -> Response:
    """What the server does, for people: no part of the Tinker API. Of the models it lists those of the caller."""
    front, caller = front_of(request), caller_of(request)
    about = await front.ask(calls.status)
    bases = [
        {
            "name": facts.name,
            "architecture": facts.architecture,
            "max_context": facts.max_context,
            "takes_images": facts.takes_images,
        }
        for facts in (front.base_models.all() if about.pop("has_engine") else [])
    ]
    trains = front.config.training.trains
    about["models"] = [each for each in about["models"] if await front.tenants.owns(caller, each["model_id"])]
    return json_reply({"version": __version__, "trains": trains, "base_models": bases, **about})


@router.get("/trace")
async def trace(request: Request) -> Response:
    """What all processes did in the last minutes, for ui.perfetto.dev; for admins. No part of the Tinker API."""
    front, asked = front_of(request), parse_query(TraceQuery, request.query_params)
    if caller_of(request).sees is not None:
        raise ForbiddenError("GET /trace shows the work of all tenants, and needs a key of an admin")
    return Response(await front.ask(calls.trace, asked.seconds), media_type="application/json")


@router.get("/auth/apikey/me")
async def describe_key(request: Request) -> Response:
    """The tenant of the API key."""
    caller = caller_of(request)
    name = caller.tenant if caller.key is None else caller.key.name
    note = "this server has no keys, and checks none" if caller.key is None else f"role: {caller.role}"
    details = {"org_details": {"name": caller.tenant}, "user_details": {"email": ""}}
    return json_reply({"key_id": 0, "name": name, "note": note, "details": details})


@router.delete("/auth/apikey/me")
async def delete_key(request: Request) -> Response:
    """Refused: a script that logs out must not end the key of others."""
    raise NotFoundError("keys are not deleted through the API: `tinsmith keys revoke NAME` beside the server ends one")
