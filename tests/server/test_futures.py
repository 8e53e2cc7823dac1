"""Long polls: what they answer, and that no wake-up is lost."""

import asyncio

import httpx
import pytest

from tests.server.serving import Served, step
from tinsmith.store.records import Outcome

FOREVER_S = 3600.0
"""A poll that waited this long would end the test by its time-out."""


@pytest.fixture
async def model_id(server: Served) -> str:
    server.hub.config.server.long_poll_s = FOREVER_S
    return await server.new_model()


async def poll(server: Served, request_id: str) -> httpx.Response:
    return await server.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True})


async def test_a_poll_is_answered_as_soon_as_the_operation_is_done(server: Served, model_id: str) -> None:
    waiting = asyncio.create_task(poll(server, f"{model_id}/0"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    server.end(f"{model_id}/0", b'{"model_id":"m"}')
    assert (await waiting).json() == await server.result(f"{model_id}/0") == {"model_id": "m"}


async def test_a_poll_ends_with_408_and_a_lost_report_costs_one(server: Served, model_id: str) -> None:
    server.hub.config.server.long_poll_s = 0.1
    server.store.record([Outcome(f"{model_id}/0", b'{"model_id":"m"}', "json", None, None)])
    replies = [await poll(server, f"{model_id}/0") for _ in range(2)]
    assert [(reply.status_code, reply.json()) for reply in replies] == [
        (408, {"queue_state": "active"}),
        (200, {"model_id": "m"}),
    ]


async def test_a_repeated_submit_leaves_the_result_where_it_is(server: Served, model_id: str) -> None:
    server.end(await server.step(model_id, 1))
    again = asyncio.create_task(server.post("optim_step", step(model_id, 1)))
    await asyncio.sleep(0)
    assert await server.result(f"{model_id}/1") == {"metrics": {}}
    await again
