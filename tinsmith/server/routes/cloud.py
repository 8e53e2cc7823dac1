"""Routes of things that a hosted service has and this server does not, such as bills and accounts. Their answers are true here."""

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
    """Storage is not billed either."""
    return json_reply({"data": []})


@router.get("/audit")
async def audit(request: Request) -> Response:
    """There is no audit log."""
    return json_reply({"entries": []})


@router.get("/auth/apikey/me")
async def describe_key(request: Request) -> Response:
    """The owner of the API key. Keys are not checked, so every key is the same owner's."""
    details = {"org_details": {"name": OWNER}, "user_details": {"email": ""}}
    return json_reply({"key_id": 0, "name": OWNER, "note": "this server does not check keys", "details": details})


@router.delete("/auth/apikey/me")
async def delete_key(request: Request) -> Response:
    """Refused: the key would still be accepted afterwards."""
    raise NotFoundError("this server keeps no API keys, so there is none to delete")
