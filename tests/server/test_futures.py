"""Long polls: what they answer, and that no wake-up is lost."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from tests.server.serving import Served, step
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store

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


async def test_polls_that_came_together_are_not_sent_again_together(
    server: Served, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    async def wait_for(request_id: str, look: object, timeout_s: float) -> None:
        waited.append(timeout_s)

    monkeypatch.setattr(server.hub.waiters, "wait_for", wait_for)
    for _ in range(50):
        assert (await poll(server, f"{model_id}/0")).status_code == 408
    assert FOREVER_S / 2 <= min(waited) < 0.7 * FOREVER_S < 0.8 * FOREVER_S < max(waited) <= FOREVER_S


async def test_polls_that_look_together_share_a_read(
    server: Served, model_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread for each, they would keep the event loop waiting."""
    looked: list[int] = []
    look = Store.looked_up

    def counted(store: Store, request_ids: Sequence[str]) -> dict[str, tuple[str, Outcome | None]]:
        looked.append(len(request_ids))
        return look(store, request_ids)

    monkeypatch.setattr(Store, "looked_up", counted)
    monkeypatch.setattr(server.hub.waiters, "expect", lambda request_id: None)
    for seq_id in range(1, 60):
        await server.step(model_id, seq_id)
    server.store.record([Outcome(f"{model_id}/{n}", b"%d" % n, "json", None, None) for n in range(1, 60)])
    replies = await asyncio.gather(*(poll(server, f"{model_id}/{n}") for n in range(1, 61)))
    assert [reply.json() for reply in replies[:-1]] == list(range(1, 60))
    assert replies[-1].status_code == 404
    assert (sum(looked), len(looked) < 30) == (60, True)


async def test_a_repeated_submit_leaves_the_result_where_it_is(server: Served, model_id: str) -> None:
    server.end(await server.step(model_id, 1))
    again = asyncio.create_task(server.post("optim_step", step(model_id, 1)))
    await asyncio.sleep(0)
    assert await server.result(f"{model_id}/1") == {"metrics": {}}
    await again
