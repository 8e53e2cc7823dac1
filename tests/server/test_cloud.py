"""What only a hosted service has is answered truthfully."""

import asyncio
from pathlib import Path

from tests.server.serving import served


def test_nothing_is_billed_and_nothing_audited(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            for path, key in (
                ("billing/usage/events?starting_on=2026-01-01&ending_before=2026-01-02", "data"),
                ("billing/usage/checkpoints/current?project_id=p", "data"),
                ("audit?event_type=checkpoint&day=2026-01-01", "entries"),
            ):
                reply = await server.client.get(f"/api/v1/{path}")
                assert (reply.status_code, reply.json()) == (200, {key: []})

    asyncio.run(run())


def test_any_key_is_the_owners_and_none_can_be_revoked(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            key = (await server.client.get("/api/v1/auth/apikey/me")).json()
            assert (key["name"], key["note"]) == ("local", "this server does not check keys")
            refused = await server.client.delete("/api/v1/auth/apikey/me")
            assert (refused.status_code, "keeps no API keys" in refused.json()["detail"]) == (404, True)

    asyncio.run(run())
