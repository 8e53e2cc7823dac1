"""A client with a short sample beside one with hundreds of long ones, and what becomes of these when their session ends."""

import time
from collections.abc import Callable

import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import API_KEY
from tests.acceptance.talking import text_input
from tests.running import START_S, Server

LONG = types.SamplingParams(max_tokens=2000, stop=[])
SHORT = types.SamplingParams(max_tokens=4, stop=[])


def samples_when(server: Server, seen: Callable[[int, int], bool]) -> tuple[int, int]:
    """How many sequences run and wait, as soon as `seen` accepts it."""
    deadline = time.monotonic() + START_S
    with server.client() as client:
        while True:
            samples = client.get("status").json()["samples"]
            if seen(samples["running"], samples["waiting"]):
                return samples["running"], samples["waiting"]
            assert time.monotonic() < deadline, samples
            time.sleep(0.1)


def test_a_short_sample_is_answered_before_any_of_many_long_ones_and_an_ended_session_is_cancelled(
    server: Server, service: tinker.ServiceClient
) -> None:
    short = service.create_sampling_client(base_model="text").result()
    with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as greedy:
        long = greedy.create_sampling_client(base_model="text").result()
        asked = [long.sample(text_input(number, 5), 4, LONG) for number in range(100)]
        _, waiting = samples_when(server, lambda running, waiting: running + waiting == 400)
        assert waiting >= 400 - 256
        for _ in range(2):
            assert len(short.sample(text_input(0, 5), 1, SHORT).result().sequences[0].tokens) == 4
        with pytest.raises(TimeoutError):  # not even the first of them has ended
            asked[0].result(timeout=0.01)
    samples_when(server, lambda running, waiting: running + waiting == 0)
    assert len(short.sample(text_input(0, 5), 1, SHORT).result().sequences[0].tokens) == 4
