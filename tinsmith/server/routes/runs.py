"""Routes of training runs: every model that was created here, and its checkpoints."""

from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.server.descriptions import describe_checkpoint, describe_run
from tinsmith.server.hub import Hub, hub_of
from tinsmith.server.replies import json_reply
from tinsmith.store import catalog
from tinsmith.store.records import TrainingRun
from tinsmith.wire.catalog_requests import CheckpointsQuery, Query, RunsQuery, ScopeQuery
from tinsmith.wire.json_body import parse_query

router = APIRouter()


@router.get("/training_runs")
async def list_runs(request: Request) -> Response:
    """A page of the runs, newest first."""
    hub = hub_of(request)
    asked = parse_query(RunsQuery, request.query_params)
    page = catalog.Page(asked.limit, asked.offset)
    runs, total = await hub.store.read(catalog.list_runs, page, asked.project_id)
    return json_reply({"training_runs": [_describe(hub, run) for run in runs], "cursor": _cursor(page, total)})


@router.get("/training_runs/{run_id}")
async def get_run(request: Request, run_id: str) -> Response:
    """One run."""
    hub = hub_of(request)
    parse_query(ScopeQuery, request.query_params)
    return json_reply(_describe(hub, await hub.store.read(catalog.find_run, run_id)))


@router.get("/training_runs/{run_id}/checkpoints")
async def list_run_checkpoints(request: Request, run_id: str) -> Response:
    """All checkpoints of one run, newest first."""
    parse_query(Query, request.query_params)
    found = await hub_of(request).store.read(catalog.list_run_checkpoints, run_id)
    return json_reply({"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in found]})


@router.get("/checkpoints")
async def list_checkpoints(request: Request) -> Response:
    """A page of the checkpoints of all runs, newest first."""
    asked = parse_query(CheckpointsQuery, request.query_params)
    page = catalog.Page(asked.limit, asked.offset)
    found, total = await hub_of(request).store.read(catalog.list_checkpoints, page)
    return json_reply({"checkpoints": [describe_checkpoint(checkpoint) for checkpoint in found], "cursor": _cursor(page, total)})


def _describe(hub: Hub, run: TrainingRun) -> dict[str, Any]:
    return describe_run(run, hub.base_models.name_of(run.model.base_model))


def _cursor(page: catalog.Page, total: int) -> dict[str, int]:
    return {"offset": page.offset, "limit": page.limit, "total_count": total}
