"""Routes that manage one checkpoint: publish, expire, delete, describe, copy."""

import math
import uuid

from fastapi import APIRouter, Request, Response

from tinsmith.errors import UserError
from tinsmith.server import calls
from tinsmith.server.access import allowed_ttl, caller_of, read_json
from tinsmith.server.descriptions import describe_weights
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import json_reply
from tinsmith.server.tenants import require_storage
from tinsmith.store import catalog
from tinsmith.store.store import Store
from tinsmith.wire.paths import parse_path
from tinsmith.wire.service_requests import CopyWeightsRequest, CreateSessionRequest, TtlRequest, WeightsInfoRequest

router = APIRouter()

CHECKPOINT = "/training_runs/{run_id}/checkpoints/{segment}/{name}"
"""A checkpoint's id has two segments, such as weights/NAME."""
_COPIES = uuid.UUID("6a2f0c1e-94d5-4d0b-8e52-0f3f7d1c9b27")
"""UUID namespace of sessions that hold copies."""


def path_of(run_id: str, segment: str, name: str) -> str:
    """The tinker:// path that a URL names. Raises UserError if it cannot name one."""
    return str(parse_path(f"tinker://{run_id}/{segment}/{name}"))


@router.delete(CHECKPOINT)
async def delete(request: Request, run_id: str, segment: str, name: str) -> Response:
    """Delete a checkpoint at once, and its files a day later, unless a copy uses them."""
    front, path = front_of(request), path_of(run_id, segment, name)
    await front.store.write(catalog.delete_checkpoint, path)
    await front.ask(calls.forget_checkpoint, path)
    return json_reply({})


@router.post(f"{CHECKPOINT}/publish")
async def publish(request: Request, run_id: str, segment: str, name: str) -> Response:
    """Mark as public. Doing so again is no error: the SDK repeats what is answered 409 for minutes."""
    await front_of(request).store.write(catalog.publish_checkpoint, path_of(run_id, segment, name), public=True)
    return json_reply({})


@router.delete(f"{CHECKPOINT}/publish")
async def unpublish(request: Request, run_id: str, segment: str, name: str) -> Response:
    """Mark as private."""
    await front_of(request).store.write(catalog.publish_checkpoint, path_of(run_id, segment, name), public=False)
    return json_reply({})


@router.put(f"{CHECKPOINT}/ttl")
async def set_ttl(request: Request, run_id: str, segment: str, name: str) -> Response:
    """Let a checkpoint expire so many seconds from now, or never."""
    front, path = front_of(request), path_of(run_id, segment, name)
    asked = await read_json(request, TtlRequest)
    await allowed_ttl(request, math.inf if asked.ttl_seconds is None else asked.ttl_seconds)
    await front.store.write(catalog.set_checkpoint_ttl, path, asked.ttl_seconds)
    await front.ask(calls.forget_checkpoint, path)
    return json_reply({})


@router.post("/weights_info")
async def weights_info(request: Request) -> Response:
    """Describe a checkpoint for a client that wants to load it."""
    asked = await read_json(request, WeightsInfoRequest)
    return json_reply(describe_weights(await front_of(request).store.read(Store.require_checkpoint, asked.tinker_path)))


@router.post("/copy_weights")
async def copy_weights(request: Request) -> Response:
    """Copy a checkpoint: the same files, in a run of its own that cannot be trained."""
    front = front_of(request)
    asked = await read_json(request, CopyWeightsRequest)
    if request.headers.get("x-tinker-weights-access-token"):
        raise UserError("weights_access_token names another account, and this server has none; leave it out")
    await require_storage(front.store, caller_of(request))
    session_id, model_seq_id = asked.session_id, asked.model_seq_id
    if session_id is None or model_seq_id is None:
        session_id, model_seq_id = await _session_for_copy(front, request, asked), 0
    ttl_s = await allowed_ttl(request, asked.ttl_seconds)
    path = await front.store.write(catalog.copy_checkpoint, asked.source_path, session_id, model_seq_id, ttl_s)
    return json_reply({"tinker_path": path})


async def _session_for_copy(front: Front, request: Request, asked: CopyWeightsRequest) -> str:
    """A session of the destination project, finished from the start.

    A retry has the same key and gets the same session.
    """
    await front.store.read(Store.require_checkpoint, asked.source_path)
    key, tenant = request.headers.get("x-idempotency-key") or uuid.uuid4().hex, caller_of(request).tenant
    session_id = str(uuid.uuid5(_COPIES, f"{key}\n{tenant}\n{asked.destination_project_id}\n{asked.source_path}"))
    if await front.store.read(Store.session, session_id) is None:
        description = CreateSessionRequest(project_id=asked.destination_project_id).model_dump()
        await front.store.write(Store.create_session, session_id, description, tenant)
        await front.store.write(Store.finish_session, session_id, "success", "holds a copy")
    return session_id
