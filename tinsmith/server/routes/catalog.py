"""Routes that list, search and describe runs, checkpoints and sessions."""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.server.access import caller_of, read_json
from tinsmith.server.descriptions import (
    NO_PROJECT,
    as_texts,
    describe_checkpoint,
    describe_run,
    describe_session,
    timestamp,
)
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import json_reply
from tinsmith.server.tenants import Caller
from tinsmith.store import catalog
from tinsmith.store.records import TrainingRun
from tinsmith.wire.json_body import parse_query
from tinsmith.wire.service_requests import (
    AssignProjectRequest,
    CheckpointsQuery,
    OwnerWanted,
    Query,
    RunsQuery,
    ScopeQuery,
    SearchCheckpointsRequest,
    SearchSessionsRequest,
    SessionsQuery,
)

router = APIRouter()


@router.get("/training_runs")
async def list_runs(request: Request) -> Response:
    """A page of the runs, newest first."""
    front = front_of(request)
    asked = parse_query(RunsQuery, request.query_params)
    page = catalog.Page(asked.limit, asked.offset)
    tenant = _tenant(request, asked)
    runs, total = await front.store.read(catalog.list_runs, page, asked.project_id, tenant)
    return json_reply({"training_runs": [_describe(front, run) for run in runs], "cursor": _cursor(page, total)})


@router.get("/training_runs/{run_id}")
async def get_run(request: Request, run_id: str) -> Response:
    """One run."""
    front = front_of(request)
    parse_query(ScopeQuery, request.query_params)
    return json_reply(_describe(front, await front.store.read(catalog.find_run, run_id)))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(request: Request, run_id: str) -> Response:
    """All checkpoints of one run, newest first."""
    parse_query(Query, request.query_params)
    found = await front_of(request).store.read(catalog.list_run_checkpoints, run_id)
    return json_reply({"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in found]})


@router.get("/checkpoints")
async def list_checkpoints(request: Request) -> Response:
    """A page of the checkpoints of all own runs, newest first."""
    asked = parse_query(CheckpointsQuery, request.query_params)
    page = catalog.Page(asked.limit, asked.offset)
    found, total = await front_of(request).store.read(catalog.list_checkpoints, page, caller_of(request).tenant)
    return json_reply(
        {"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in found], "cursor": _cursor(page, total)}
    )


def _describe(front: Front, run: TrainingRun) -> dict[str, Any]:
    return describe_run(run, front.base_models.name_of(run.model.base_model))


def _cursor(page: catalog.Page, total: int) -> dict[str, int]:
    return {"offset": page.offset, "limit": page.limit, "total_count": total}


@router.post("/checkpoints/search")
async def search_checkpoints(request: Request) -> Response:
    """A page of the checkpoints that match, newest first. Not tested with an SDK that sends it."""
    asked = await read_json(request, SearchCheckpointsRequest)
    cursor = asked.cursor
    wanted = catalog.CheckpointFilter(
        project_ids=_projects(asked.project_ids),
        user_metadata=asked.user_metadata,
        kind=asked.checkpoint_type,
        base_models=asked.base_models,
        before=None if cursor is None else (cursor.last_created_at.timestamp(), cursor.last_checkpoint_uuid),
        tenants=_owners(asked.owner, caller_of(request)),
    )
    # One more than asked for shows whether there is another page.
    found = await front_of(request).store.read(catalog.search_checkpoints, wanted, asked.limit + 1, time.time())
    page = found[: asked.limit]
    reply: dict[str, Any] = {"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in page]}
    if len(found) > len(page):
        last = page[-1]
        reply["next_cursor"] = {
            "last_created_at": timestamp(last.created_at),
            "last_checkpoint_uuid": last.tinker_path,
        }
    return json_reply(reply)


def _projects(asked: Sequence[str] | None) -> list[str | None] | None:
    return None if asked is None else [None if project == NO_PROJECT else project for project in asked]


@router.get("/sessions")
async def list_sessions(request: Request) -> Response:
    """A page of session ids, newest first."""
    asked = parse_query(SessionsQuery, request.query_params)
    page = catalog.Page(asked.limit, asked.offset)
    found = await front_of(request).store.read(catalog.list_sessions, page, _tenant(request, asked))
    return json_reply({"sessions": found})


def _tenant(request: Request, asked: ScopeQuery) -> str | None:
    """The tenant whose things to list; None for all."""
    caller = caller_of(request)
    return caller.tenant if asked.access_scope == "owned" else caller.sees


@router.get("/sessions/{session_id}")
async def get_session(request: Request, session_id: str) -> Response:
    """The models and sampling sessions of a session."""
    parse_query(ScopeQuery, request.query_params)
    found = await front_of(request).store.read(catalog.describe_session, session_id)
    return json_reply(
        {
            "training_run_ids": found.model_ids,
            "sampler_ids": found.sampling_session_ids,
            "user_metadata": as_texts(found.user_metadata),
            "display_name": found.display_name,
        }
    )


@router.put("/sessions/{session_id}/project")
async def assign_project(request: Request, session_id: str) -> Response:
    """Put a session into a project, which is only a name."""
    asked = await read_json(request, AssignProjectRequest)
    await front_of(request).store.write(catalog.assign_project, session_id, asked.project_id)
    return json_reply({})


@router.post("/sessions/search")
async def search_sessions(request: Request) -> Response:
    """A page of the sessions that match, newest first."""
    asked = await read_json(request, SearchSessionsRequest)
    # One more than asked for shows whether there is another page.
    found = await front_of(request).store.read(
        catalog.search_sessions, _filter(asked, caller_of(request)), asked.limit + 1, time.time()
    )
    page = found[: asked.limit]
    reply = {"sessions": [describe_session(session) for session in page]}
    if len(found) > len(page):
        last = page[-1]
        return json_reply(
            reply | {"next_cursor": {"last_created_at": timestamp(last.created_at), "last_session_id": last.session_id}}
        )
    return json_reply(reply)


def _filter(asked: SearchSessionsRequest, caller: Caller) -> catalog.SessionFilter:
    cursor = asked.cursor
    return catalog.SessionFilter(
        session_id=asked.session_id,
        display_name=asked.display_name,
        project_ids=_projects(asked.project_ids),
        user_metadata=asked.user_metadata,
        statuses=None if asked.statuses is None else [(status.type, status.reasons) for status in asked.statuses],
        before=None if cursor is None else (cursor.last_created_at.timestamp(), cursor.last_session_id),
        tenants=_owners(asked.owner, caller),
    )


def _owners(wanted: OwnerWanted, caller: Caller) -> list[str] | None:
    """The tenants whose sessions to search; None for all."""
    if wanted.type == "own":
        return [caller.tenant]
    if wanted.owner_urns is None:
        return None if caller.sees is None else [caller.sees]
    return [owner for owner in wanted.owner_urns if caller.sees in (None, owner)]
