"""A pass is divided so that each datum is computed once, and what its shares give is one result again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.forwarding import Device
from tinsmith.engine.shares import PIXELS_OF_A_TOKEN, QUADRATIC_TOKENS, cost, divide, image_cost, join
from tinsmith.errors import UserError
from tinsmith.protocol.work import Drop, PassDone, RunPass

ENOUGH = 2**40
"""Tokens of a share that no pass here comes near."""


def a_pass(*lengths: int) -> RunPass:
    """A pass of datums of three operations."""
    return RunPass(7, "tiny", True, [(f"operation {place % 3}", place) for place in range(len(lengths))], list(lengths))


def with_images(*datums: tuple[int, dict[str, int]]) -> RunPass:
    """A pass of datums of these lengths, and pixels of the images in them."""
    return replace(a_pass(*(length for length, _ in datums)), pixels=[images for _, images in datums])


def lengths_of(shares: list[RunPass | None]) -> list[list[int]]:
    return [[] if share is None else share.lengths for share in shares]


@given(st.lists(st.integers(1, 2**17), min_size=1, max_size=40), st.integers(1, 9))
def test_each_datum_has_one_worker_and_keeps_its_place_and_length(lengths: list[int], count: int) -> None:
    whole = a_pass(*lengths)
    shares = divide(whole, count, ENOUGH)
    assert len(shares) == count
    there = [share for share in shares if share is not None]
    assert all((share.number, share.base_model, share.backward) == (7, "tiny", True) for share in there)
    assert all(share.pieces for share in there)  # who has nothing to compute is not told
    pairs = list(zip(whole.pieces, whole.lengths, strict=True))
    divided = [list(zip(share.pieces, share.lengths, strict=True)) for share in there]
    assert sorted(pair for share in divided for pair in share) == sorted(pairs)
    assert all(
        [pairs.index(pair) for pair in share] == sorted(pairs.index(pair) for pair in share) for share in divided
    )


def test_who_has_no_datum_is_told_of_a_pass_that_all_compute_and_a_worker_alone_gets_all_of_it() -> None:
    shares = divide(a_pass(5), 3, ENOUGH, everyone=True)
    assert sorted(map(len, lengths_of(shares))) == [0, 0, 1]
    assert all(share and (share.number, share.base_model, share.backward) == (7, "tiny", True) for share in shares)
    whole = a_pass(3, 1, 2)
    assert divide(whole, 1, ENOUGH) == [whole]


@given(st.lists(st.tuples(st.integers(1, 2**14), st.integers(0, 2**24)), min_size=1, max_size=40), st.integers(2, 9))
def test_images_count_for_an_even_share(datums: list[tuple[int, int]], count: int) -> None:
    """No worker has more than one datum over it: when that was given to it, nobody had less to do, so at most the mean
    of all.

    Each datum has an image of its own, or none.
    """
    whole = with_images(
        *((length, {f"{place}": pixels} if pixels else {}) for place, (length, pixels) in enumerate(datums))
    )
    costs = [cost(length) + image_cost(pixels, length) for length, pixels in datums]
    for share in divide(whole, count, ENOUGH):
        own = [costs[place] for _, place in share.pieces] if share else []
        assert sum(own) <= (sum(costs) / count + min(own, default=0.0)) * (1 + 1e-9)  # sums of floats in another order


SHORT = QUADRATIC_TOKENS // 16


@pytest.mark.parametrize(
    ("lengths", "count", "most", "shares"),
    [
        # The dearest goes first, to the worker with least to do.
        ([1, 2, 3, 4, 5, 6], 2, ENOUGH, [[1, 3, 6], [2, 4, 5]]),
        ([4, 9], 4, ENOUGH, [[9], [4], [], []]),
        # A long sequence costs more than short ones of as many tokens: one of QUADRATIC_TOKENS costs twice its tokens.
        # A short one costs 2,176, 30 of them 65,280, and the long one 65,536: so the second worker gets one more, and
        # the first the last.
        ([QUADRATIC_TOKENS, *[SHORT] * 32], 2, ENOUGH, [[QUADRATIC_TOKENS, SHORT], [SHORT] * 31]),
        # Short ones that cost as much take twice the memory: the rest goes to who has room.
        ([QUADRATIC_TOKENS, *[SHORT] * 32], 2, 24 * SHORT, [[QUADRATIC_TOKENS, *[SHORT] * 8], [SHORT] * 24]),
        # What has no room anywhere goes to the worker with most room.
        ([90, 60, 50], 2, 100, [[90], [60, 50]]),
        ([300, 200, 100], 2, 100, [[300], [200, 100]]),
    ],
)
def test_sequences_are_divided_by_what_they_cost_and_take(
    lengths: list[int], count: int, most: int, shares: list[list[int]]
) -> None:
    assert lengths_of(divide(a_pass(*lengths), count, most)) == shares


ANSWER = (2**14, {"large": 2**24})


@pytest.mark.parametrize(
    ("datums", "most", "places"),
    [
        # Sequences of one length in turns: by their tokens alone each second one, with all images, would go to the
        # first worker.
        (
            [pair for name in "abcd" for pair in ((300, {name: 256 * PIXELS_OF_A_TOKEN}), (300, {}))],
            ENOUGH,
            [[0, 1, 4, 5], [2, 3, 6, 7]],
        ),
        # A huge image costs 2.3 times its pixels, and small ones hardly more than theirs: 3,181 against 168 each.
        (
            [
                *((140, {f"small {place}": 128 * PIXELS_OF_A_TOKEN}) for place in range(20)),
                (2100, {"huge": 2048 * PIXELS_OF_A_TOKEN}),
            ],
            ENOUGH,
            [[19, 20], [*range(19)]],
        ),
        # One of several sequences costs a worker once: a text of 80,415, and three answers of 24,576 each about one
        # image of 37,635.
        ([(37_500, {}), ANSWER, ANSWER, ANSWER], ENOUGH, [[0], [1, 2, 3]]),
        ([(37_500, {}), *((2**14, {name: 2**24}) for name in "abc")], ENOUGH, [[0, 3], [1, 2]]),
        # It costs no more than its sequence has tokens for: some models make a photograph of 12 million pixels as small
        # as 64 tokens.
        ([(64, {"photo": 12_000_000}), (60, {}), (60, {})], ENOUGH, [[0], [1, 2]]),
        # The image makes the first one's share the dearest by far, yet the second has no room for more than two of the
        # texts.
        ([(100, {"huge": 10**7}), (60, {}), (60, {}), (60, {})], 160, [[0, 3], [1, 2]]),
    ],
    ids=["in turns", "huge", "shared", "not shared", "small", "memory"],
)
def test_images_are_divided_by_what_they_cost(
    datums: list[tuple[int, dict[str, int]]], most: int, places: list[list[int]]
) -> None:
    shares = divide(with_images(*datums), 2, most)
    assert [[place for _, place in share.pieces] for share in shares if share] == places
    assert [share.pixels for share in shares if share] == [[], []]  # workers are not told of them


# ---- Results


def test_the_results_of_shares_are_read_as_those_of_one_worker() -> None:
    """Losses with metrics of several names and numbers, log-probabilities of several shapes, and an infinite loss."""
    device = Device()
    for lengths in ([3, 5], [4], [2, 2]):
        device.train("m", lengths)
    (asked,) = device.given()
    losses = [1.5, -2.25, float("inf"), 4.0, 1e-300]
    metrics: list[dict[str, float]] = [
        {},
        {"kl:sum": 0.5, "clipped:mean": 0.25},
        {"kl:sum": -1.0},
        {},
        {"a": 1.0, "b": 2.0, "c": 3.0},
    ]
    shapes = [(3,), (5, 2), (4,), (0,), (2, 3)]
    logprobs = [
        np.random.default_rng(place).normal(size=shape).astype(np.float32) for place, shape in enumerate(shapes)
    ]

    def part(places: list[int]) -> PassDone:
        """What a worker says of the datums that it has computed, laid out as `PassDone` describes it."""
        results = [(*asked.pieces[i], list(shapes[i])) for i in places]
        numbers = [*(losses[i] for i in places), *(value for i in places for value in metrics[i].values())]
        payload = b"".join([np.array(numbers).tobytes(), *(logprobs[i].tobytes() for i in places)])
        return PassDone(asked.number, results, [], 10, [list(metrics[i]) for i in places], [], payload)

    device.forward.take(join([part([1, 4]), part([0, 2, 3])], 25))
    found = {}
    for operation in device.forward.take_complete():
        for index, output in operation.results.items():
            found[asked.pieces.index((operation.command.request_id, index))] = output
    for place in range(5):
        assert (found[place].loss, found[place].metrics, found[place].logprobs.shape) == (
            losses[place],
            metrics[place],
            shapes[place],
        )
        assert np.array_equal(found[place].logprobs, logprobs[place])
    assert (device.failed, device.forward.order.paces.full["tiny"]) == ([], 25)
    assert device.sent == [Drop(["m/1", "m/3", "m/5"])]  # others hold the datums that a worker has computed


def test_a_share_that_failed_fails_its_operations_and_no_other() -> None:
    device = Device()
    device.train("m", [3, 5])
    device.train("m", [4])
    (asked,) = device.given()
    first, second, third = asked.pieces
    failed = PassDone(asked.number, [], [(*second, "UserError", "datum 1")], 10, [], [], b"")
    payload = np.array([1.0, 2.0, 3.0]).tobytes() + np.array([-0.5] * 3 + [-1.5] * 4, np.float32).tobytes()
    done = PassDone(asked.number, [(*first, [3]), (*third, [4])], [], 10, [["m"], []], [], payload)
    device.forward.take(join([failed, done], 10))
    assert [(request_id, type(error), str(error)) for request_id, error in device.failed] == [
        ("m/1", UserError, "datum 1")
    ]
    (operation,) = device.forward.take_complete()
    assert (operation.command.request_id, operation.results[0].loss) == ("m/3", 2.0)
    assert operation.results[0].logprobs.tolist() == [-1.5] * 4


def test_a_pass_says_which_images_are_new() -> None:
    device = Device()
    device.train("m", [3, 5], [{}, {"one": 7, "two": 8}])
    assert device.given()[0].pixels == [{}, {"one": 7, "two": 8}]
