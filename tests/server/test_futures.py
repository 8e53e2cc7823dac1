"""Long polls: what they answer, and that no wake-up is lost."""

import asyncio

from tests.server.serving import Served
from tinsmith.store.records import Outcome

FOREVER_S = 3600.0
"""A poll that waited this long would end the test by its time-out."""


async def test_a_poll_is_answered_as_soon_as_the_operation_is_done(server: Served) -> None:
    server.hub.config.server.long_poll_s = FOREVER_S
    model_id = await server.new_model(await server.new_session())
    request_id = f"{model_id}/0"
    poll = asyncio.create_task(server.post("retrieve_future", {"request_id": request_id, "allow_metadata_only": True}))
    await asyncio.sleep(0.2)
    assert not poll.done()
    server.finish(Outcome(request_id, b'{"model_id":"m"}', "json", None, None))
    reply = await poll
    assert reply.json() == {"model_id": "m"}
    assert (await server.post("retrieve_future", {"request_id": request_id})).json() == {"model_id": "m"}


async def test_a_lost_report_costs_one_poll(server: Served) -> None:
    server.hub.config.server.long_poll_s = 0.1
    request_id = f"{await server.new_model(await server.new_session())}/0"
    server.store.record([Outcome(request_id, b'{"model_id":"m"}', "json", None, None)])
    replies = [await server.post("retrieve_future", {"request_id": request_id}) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [408, 200]
    assert replies[1].json() == {"model_id": "m"}


async def test_a_repeated_submit_leaves_the_result_where_it_is(server: Served) -> None:
    server.hub.config.server.long_poll_s = FOREVER_S
    model_id = await server.new_model(await server.new_session())
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
    await server.post("optim_step", step)
    server.finish(Outcome(f"{model_id}/1", b'{"metrics":{}}', "json", None, None))
    again = asyncio.create_task(server.post("optim_step", step))
    await asyncio.sleep(0)
    reply = await server.post("retrieve_future", {"request_id": f"{model_id}/1"})
    assert reply.json() == {"metrics": {}}
    await again


async def test_a_poll_ends_with_408(server: Served) -> None:
    server.hub.config.server.long_poll_s = 0.1
    model_id = await server.new_model(await server.new_session())
    reply = await server.post("retrieve_future", {"request_id": f"{model_id}/0"})
    assert (reply.status_code, reply.json()) == (408, {"queue_state": "active"})


async def test_results_keep_their_type_and_failures_are_final_answers(server: Served) -> None:
    model_id = await server.new_model(await server.new_session())
    for seq_id in (1, 2):
        await server.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    server.finish(Outcome(f"{model_id}/1", b"\x0a\x01x", "protobuf", None, None))
    server.finish(Outcome(f"{model_id}/2", None, None, "datum 1: bad", "user"))
    protobuf = await server.post("retrieve_future", {"request_id": f"{model_id}/1"})
    assert protobuf.headers["content-type"] == "application/x-protobuf"
    assert protobuf.content == b"\x0a\x01x"
    failed = await server.post("retrieve_future", {"request_id": f"{model_id}/2"})
    assert (failed.status_code, failed.json()) == (200, {"error": "datum 1: bad", "category": "user"})


async def test_closing_releases_all_polls(server: Served) -> None:
    server.hub.config.server.long_poll_s = FOREVER_S
    model_id = await server.new_model(await server.new_session())
    polls = [asyncio.create_task(server.post("retrieve_future", {"request_id": f"{model_id}/0"})) for _ in range(3)]
    await asyncio.sleep(0.2)
    server.hub.waiters.close()
    assert [reply.status_code for reply in await asyncio.gather(*polls)] == [408] * 3
    late = await server.post("retrieve_future", {"request_id": f"{model_id}/0"})
    assert late.status_code == 408
