"""What was used, stored and done with checkpoints: of the caller's tenant, of all for an admin."""

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.errors import UserError
from tinsmith.server.access import caller_of
from tinsmith.server.descriptions import NO_PROJECT, as_texts, timestamp
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import json_reply
from tinsmith.store import catalog
from tinsmith.store.records import UsedBy
from tinsmith.store.usage import DAY_S, HOUR_S, used_between
from tinsmith.wire.json_body import parse_query
from tinsmith.wire.service_requests import AuditQuery, StorageQuery, UsageQuery

router = APIRouter()

_MOST_DAYS = 14


@router.get("/billing/usage/events")
async def billing_usage(request: Request) -> Response:
    """Tokens and storage by hour, base model and session. Nothing has a price."""
    front, caller = front_of(request), caller_of(request)
    asked = parse_query(UsageQuery, request.query_params)
    start, end = asked.starting_on.timestamp(), asked.ending_before.timestamp()
    if not 0 <= end - start <= _MOST_DAYS * DAY_S:
        raise UserError(f"ending_before must lie up to {_MOST_DAYS} days behind starting_on")
    found = await front.store.read(used_between, start, end, caller.sees)
    about = await front.store.read(catalog.find_sessions, {each.session_id for each in found if each.session_id})
    events = [event for each in found for event in _events(front, each, about)]
    events.sort(key=lambda event: (event["bucket_start"], -event["event_info"].get("token_count", 0)))
    sessions = {name: {"user_metadata": as_texts(metadata)} for name, (_, metadata) in about.items()}
    return json_reply({"data": events, "sessions": sessions})


def _events(
    front: Front, found: UsedBy, about: Mapping[str, tuple[str | None, dict[str, Any] | None]]
) -> Iterator[dict[str, Any]]:
    project, _ = about.get(found.session_id, (None, None))
    envelope = {
        "bucket_start": timestamp(found.hour),
        "bucket_end": timestamp(found.hour + HOUR_S),
        "base_model": front.base_models.name_of(found.base_model),
        "user_id": found.tenant,
        "user_name": found.tenant,
        "session_id": found.session_id or None,
        "project_id": project,
    }
    used = found.used
    for kind, more, count in (
        ("training", {}, used.trained_tokens),
        ("sampling_prefill", {"cached": False}, used.prefilled_tokens),
        ("sampling_prefill", {"cached": True}, used.cached_tokens),
        ("sampling_sample", {}, used.sampled_tokens),
    ):
        if count:
            yield envelope | {"event_info": {"type": kind, "token_count": count} | more}
    if found.stored_bytes:
        yield envelope | {"event_info": {"type": "storage", "gigabyte_hours": found.stored_bytes / 1e9}}


@router.get("/billing/usage/checkpoints/current")
async def billing_checkpoints(request: Request) -> Response:
    """The checkpoints that are stored now, by project and tenant."""
    asked = parse_query(StorageQuery, request.query_params)
    found = await front_of(request).store.read(catalog.stored_by_project, caller_of(request).sees)
    rows = [
        {
            "project_id": project or NO_PROJECT,
            "org_user_urn": tenant,
            "user_name": tenant,
            "checkpoint_count": count,
            "size_bytes": size,
            "size_gigabytes": size / 1e9,
        }
        for (tenant, project), (count, size) in found.items()
    ]
    wanted = asked.project_id
    return json_reply({"data": [row for row in rows if wanted is None or row["project_id"] == wanted]})


@router.get("/audit")
async def audit(request: Request) -> Response:
    """The checkpoints that were saved and loaded on a day, by the command log. There are no other events."""
    asked = parse_query(AuditQuery, request.query_params)
    if asked.event_type not in ("all", "checkpoints"):
        return json_reply({"entries": []})
    found = await front_of(request).store.read(catalog.checkpoint_events, asked.start, DAY_S, caller_of(request).sees)
    entries = [
        {
            "timestamp": timestamp(each.at),
            "event": "checkpoint_read" if "load" in each.kind or "from" in each.kind else "checkpoint_write",
            "event_details": {"tenant": each.tenant, "operation": each.kind, "request_id": each.request_id},
            "model_id": each.model_id,
            "tinker_path": each.tinker_path,
        }
        for each in found
    ]
    return json_reply({"entries": entries})
