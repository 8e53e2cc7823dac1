"""One client's short sample and step beside 2,000 long samples of another, and what becomes of these when given up."""

import asyncio
import time

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.talking import text_input
from tests.running import Server

ENDLESS = types.SamplingParams(max_tokens=20_000, stop=[])
LONG = types.SamplingParams(max_tokens=2000, stop=[])
SHORT = types.SamplingParams(max_tokens=4, stop=[])


def test_a_short_sample_and_a_step_are_done_before_any_of_2000_long_samples_and_an_ended_session_is_cancelled(
    server: Server, service: tinker.ServiceClient
) -> None:
    model = service.create_lora_training_client("text", rank=4).result()
    short = model.save_weights_and_get_sampling_client().result()
    with connect(server) as greedy:
        long = greedy.create_sampling_client(base_model="text").result()
        asked = [long.sample(text_input(number, 5), 4, LONG) for number in range(500)]
        status = server.wait_for_status(lambda status: sum(status["samples"].values()) == 2000)
        assert status["samples"]["waiting"] >= 2000 - 256
        for _ in range(2):
            began = time.monotonic()
            assert len(short.sample(text_input(0, 5), 1, SHORT).result().sequences[0].tokens) == 4
            model.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            assert time.monotonic() - began < 10
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
