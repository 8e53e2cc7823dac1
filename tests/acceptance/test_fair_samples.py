"""One client's short sample beside hundreds of long ones of another, and what becomes of these when given up."""

import asyncio

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.talking import text_input
from tests.running import Server

ENDLESS = types.SamplingParams(max_tokens=20_000, stop=[])
LONG = types.SamplingParams(max_tokens=2000, stop=[])
SHORT = types.SamplingParams(max_tokens=4, stop=[])


def test_a_short_sample_is_answered_before_any_of_many_long_ones_and_an_ended_session_is_cancelled(
    server: Server, service: tinker.ServiceClient
) -> None:
    short = service.create_sampling_client(base_model="text").result()
    with connect(server) as greedy:
        long = greedy.create_sampling_client(base_model="text").result()
        asked = [long.sample(text_input(number, 5), 4, LONG) for number in range(100)]
        status = server.wait_for_status(lambda status: sum(status["samples"].values()) == 400)
        assert status["samples"]["waiting"] >= 400 - 256
        for _ in range(2):
            assert len(short.sample(text_input(0, 5), 1, SHORT).result().sequences[0].tokens) == 4
        with pytest.raises(TimeoutError):  # not even the first of them has ended
            asked[0].result(timeout=0.01)
    server.wait_for_status(lambda status: sum(status["samples"].values()) == 0)
    assert len(short.sample(text_input(0, 5), 1, SHORT).result().sequences[0].tokens) == 4


def test_a_sample_that_its_client_gives_up_stops(server: Server, service: tinker.ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model="text").result()

    async def give_up() -> None:
        asked = asyncio.ensure_future(sampler.sample_async(text_input(0, 5), 8, ENDLESS))
        await asyncio.to_thread(server.wait_for_status, lambda status: status["samples"]["running"] == 8)
        asked.cancel()
        await asyncio.to_thread(server.wait_for_status, lambda status: status["samples"]["running"] == 0)

    asyncio.run(give_up())
