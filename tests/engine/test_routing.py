"""Which worker samples a request: one that knows its prefix, unless others have less to do.

What has ended leaves nothing behind.
"""

from typing import Any

import orjson
import pytest

from tinsmith.engine.routing import BLOCK, DECODE, IMAGE_TOKENS, LARGEST, Routing
from tinsmith.protocol.serving import Sample
from tinsmith.store import ids


class Asked:
    """A routing, and short ways to ask it."""

    def __init__(self, count: int) -> None:
        self.routing = Routing(count)
        self.number = 0

    def sample(
        self,
        *chunks: list[int] | dict[str, Any],
        weights: str | None = None,
        max_tokens: int | None = 1,
        num: int = 1,
        session: str = "s",
    ) -> tuple[int, str]:
        """Route a prompt; the worker and the request id."""
        self.number += 1
        request_id = f"{session}:sample:0/{self.number}"
        prompt = [chunk if isinstance(chunk, dict) else {"type": "encoded_text", "tokens": chunk} for chunk in chunks]
        body = {"prompt": {"chunks": prompt}, "sampling_params": {"max_tokens": max_tokens}, "num_samples": num}
        return self.routing.choose(Sample(request_id, 1, "tiny", weights, num, False, orjson.dumps(body))), request_id

    def finish(self, *samples: tuple[int, str]) -> None:
        for _, request_id in samples:
            self.routing.ended(request_id, 1)

    @property
    def loads(self) -> list[float]:
        return [worker.load for worker in self.routing.workers]


def tokens(seed: int, blocks: int) -> list[int]:
    """A text of so many pieces that shares none with that of another seed."""
    return [seed * 1000 + i % 997 for i in range(blocks * BLOCK)]


def test_the_worker_with_the_longest_known_prefix_wins_where_all_have_the_same_to_do() -> None:
    asked = Asked(3)
    text = tokens(1, 6)
    first, second, third = (asked.sample(text[: blocks * BLOCK] + tokens(blocks, 3)) for blocks in (1, 4, 2))
    assert (first[0], second[0], third[0]) == (0, 1, 2)  # each went to one with nothing to do
    asked.finish(first, second, third)
    assert asked.loads == [0, 0, 0]
    assert asked.sample(text)[0] == 1
    # What is known from a later place on does not count: the cache holds beginnings.
    assert Asked(2).sample(tokens(9, 1) + text)[0] == 0


def test_much_to_do_outweighs_a_known_prefix_and_little_does_not() -> None:
    """Knowing 4 pieces is worth 4 * BLOCK: a sample of fewer tokens there changes nothing, a longer does."""
    for left_to_do, chosen in ((4 * BLOCK - DECODE, 0), (4 * BLOCK + DECODE, 1)):
        asked = Asked(2)
        asked.finish(asked.sample(tokens(1, 4)))
        busy = asked.sample([], max_tokens=left_to_do // DECODE)
        assert (busy[0], asked.loads) == (0, [left_to_do, 0])
        assert asked.sample(tokens(1, 4))[0] == chosen


def test_other_weights_and_other_images_are_another_prompt() -> None:
    """An image counts as tokens.

    What the second knows of the first prompt, its head, is worth less than an idle worker.
    """
    image: dict[str, Any] = {"type": "image", "format": "png", "data": "QUJD"}
    pointer: dict[str, Any] = {"type": "image_asset_pointer", "format": "png", "location": "tinsmith://blob/1"}
    head, tail = tokens(1, 1), tokens(2, 2)
    cost = 3 * BLOCK + IMAGE_TOKENS + DECODE
    for one, other, load in (
        (([head, tail], None), ([head, tail], "s:train:0/3"), 3 * BLOCK + DECODE),
        (([head, image, tail], None), ([head, pointer, tail], None), cost),
    ):
        asked = Asked(2)
        samples = [asked.sample(*chunks, weights=weights) for chunks, weights in (one, other)]
        assert ([worker for worker, _ in samples], asked.loads) == ([0, 1], [load, load])
        asked.finish(*samples)
        for (chunks, weights), worker in ((other, 1), (one, 0)):
            again = asked.sample(*chunks, weights=weights)
            assert again[0] == worker
            asked.finish(again)
        assert asked.loads == [0, 0]


def test_what_has_ended_or_is_forgotten_leaves_nothing_behind() -> None:
    """Exactly 0 after thousands of samples: rounding would add up in an engine that runs for months."""
    asked = Asked(2)
    pair = [asked.sample(tokens(1, 2), max_tokens=10, num=4), asked.sample(tokens(2, 2), max_tokens=None, num=2)]
    # Samples and their lengths are what costs. Without max_tokens an answer is taken to be as long as its prompt.
    assert asked.loads == [2 * BLOCK + DECODE * 4 * 10, 2 * BLOCK + DECODE * 2 * 2 * BLOCK]
    asked.finish(*pair)
    assert asked.loads == [0, 0]
    asked = Asked(3)
    samples = [
        asked.sample(tokens(i % 7, i % 5), max_tokens=1 + i % 11, num=1 + i % 3, session=f"s{i % 2}")
        for i in range(2000)
    ]
    assert len(asked.routing.running) == 2000
    assert {asked.routing.of(request_id, 1) for worker, request_id in samples if worker == 2} == {2}
    asked.finish(*samples[1::4])
    asked.finish(*samples[1::4])  # told again, as where an answer crosses the cancelling of its sample
    asked.routing.forget(lambda request_id: ids.session_of(request_id) == "s0")
    assert {ids.session_of(request_id) for request_id, _ in asked.routing.running} == {"s1"}
    asked.finish(*samples)
    assert (asked.loads, asked.routing.running) == ([0, 0, 0], {})
    assert asked.routing.of(samples[0][1], 1) is None


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_large_or_no_json_is_not_read(count: int) -> None:
    """It counts by its size; so does a request with a number that the server's parser takes and orjson does not."""
    asked = Asked(count)
    strange = b'{"prompt":{"chunks":[]},"sampling_params":{},"prompt_logprobs_last_n":' + b"9" * 400 + b"}"
    large = b"{" * (LARGEST + 8)
    chosen = [
        asked.routing.choose(Sample(f"s:sample:0/{i}", 1, "tiny", None, 1, False, body))
        for i, body in enumerate((large, strange))
    ]
    size = len(large) // 8
    assert (chosen, asked.loads[0] in (0, size + DECODE * size)) == ([0, count - 1], True)
    for number in range(2):
        asked.routing.ended(f"s:sample:0/{number}", 1)
    assert asked.loads == [0] * count
