"""What a hosted service has and this server does not: bills, an audit log, accounts. Clients that ask get answers that are true here."""

from fastapi import APIRouter, Request, Response

from tinsmith.errors import NotFoundError
from tinsmith.server.descriptions import OWNER
from tinsmith.server.replies import json_reply

router = APIRouter()


@router.get("/billing/usage/events")
async def billing_usage(request: Request) -> Response:
    """Nothing is billed."""
    return json_reply({"data": []})


@router.get("/billing/usage/checkpoints/current")
async def billing_checkpoints(request: Request) -> Response:
    """Nothing is billed, storage neither."""
    return json_reply({"data": []})


@router.get("/audit")
async def audit(request: Request) -> Response:
    """No such events are recorded."""
    return json_reply({"entries": []})


@router.get("/auth/apikey/me")
async def describe_key(request: Request) -> Response:
    """Whose the key is: keys are not checked, so any one is the owner's."""
    details = {"org_details": {"name": OWNER}, "user_details": {"email": ""}}
    return json_reply({"key_id": 0, "name": OWNER, "note": "this server does not check keys", "details": details})


@router.delete("/auth/apikey/me")
async def delete_key(request: Request) -> Response:
    """There is no key to delete: saying it was would be untrue, as it goes on being accepted."""
    raise NotFoundError("this server keeps no API keys, so there is none to delete")
