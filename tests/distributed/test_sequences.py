"""Processes that compute a sequence together give and learn what one does; what fails on one of them leaves nothing on any."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import load
from tests.distributed.conftest import Processes
from tests.distributed.devices import ROUNDING
from tests.distributed.slicing import CASES, LENGTHS, STEPS, train
from tests.extent import slow
from tinsmith.config import TrainingConfig
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.sequence_slices import share_heads, slices_of

WITHIN = 1e-5
"""Of the largest number of a tensor: sums over tokens are added up in another order."""
WITHIN_HYBRID = 5e-4 * ROUNDING
"""Of hybrid models. So much the gradients of the tiny one change if its weights change in their last bit: its delta nets hand on from token
to token what is rounded in another way. A token that is lost or counted twice changes them by a hundredth."""


@pytest.fixture(scope="module")
def alone(bases: Path) -> Callable[[str], dict[str, Any]]:
    """What one worker finds in a case."""

    @cache
    def run(case: str) -> dict[str, Any]:
        base = load(bases / CASES[case][0])
        backend = LocalBackend(base, TrainingConfig(logits_chunk=16))

        def long(work: DatumWork, backward: bool) -> DatumResult:
            (result,) = backend.run_pass([work], backward).results
            assert result is not None
            return result

        return train(base, backend, case, long)

    return run


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize("case", CASES)
def test_everything_is_as_one_worker_computes_it(
    processes: Processes, alone: Callable[[str], dict[str, Any]], case: str, count: int
) -> None:
    """Log-probabilities, losses, the gradient of every parameter, and weights, with short sequences that one process computes.

    Each computes its slice and no more.
    """
    name, what, ranks = CASES[case]
    _, found = processes("slicing", count)
    all_found = [of_process[case] for of_process in found]
    for key, expected in alone(case).items():
        of_each = [of_process[key] for of_process in all_found]
        within = WITHIN_HYBRID if name == "hybrid" else WITHIN
        if key.endswith("gradients"):
            for number, parts in enumerate(zip(expected, *of_each, strict=True)):
                assert parts[0].any(), (key, number)
                assert far(sum(parts[1:], torch.zeros(())), parts[0]) < within, (key, number)
        elif key.endswith("weights"):
            for number, (one, first) in enumerate(zip(expected, of_each[0], strict=True)):
                assert far(first, one) < within, (key, number)
                assert all(torch.equal(other[number], first) for other in of_each)
        elif key.endswith("norm"):
            assert of_each == [pytest.approx(expected, rel=within)] * count
            assert len(set(of_each)) == 1
        else:
            (logprobs, loss), (one, one_loss) = of_each[0], expected
            assert far(logprobs, one) < within
            assert loss == pytest.approx(one_loss, rel=within)
            assert all(torch.equal(other, logprobs) and other_loss == loss for other, other_loss in of_each)
    assert len([key for key in alone(case) if key.endswith("gradients")]) == STEPS * len(ranks)

    rows = [[row for row in of_process[f"{case} computed"] if row != 9] for of_process in found]  # without the short datums of the first
    assert len(rows[0]) == 2 * STEPS * len(ranks)
    for lengths in zip(*rows, strict=True):
        assert max(lengths) - min(lengths) <= 1
    if what != "pictures":
        assert {sum(lengths) for lengths in zip(*rows, strict=True)} == set(LENGTHS)


def test_what_one_cannot_compute_fails_on_all_and_leaves_no_gradient(processes: Processes) -> None:
    """Processes at different passes end instead of mixing them, and who finds the others gone in the middle says so."""
    expected = {
        "broken": ("UserError", "image 3 is broken"),
        "short": ("TinsmithError", "a sequence of 20 tokens is too short to be divided among 2 workers"),
        "missing": ("NotFoundError", "model there is not loaded; create it anew"),
        "forward": ("TinsmithError", "the pass failed: RuntimeError: no kernel"),
        "backward": ("TinsmithError", "the pass failed: RuntimeError: no kernel"),
        "another pass": ("DeviceLostError", "the workers are not the same any more: the pass that comes next is ["),
        "alone": ("WorkersLostError", "worker 0 of 2 cannot reach the others: "),
    }
    needs = "a sequence of 97 tokens needs more memory than 2 workers together have left"
    expected["no memory"] = ("TinsmithError", f"the pass failed: {needs}: OutOfMemoryError: no memory")
    for rank, found in enumerate(processes("slicing", 2)[1]):
        for name, (error, message) in expected.items():
            if rank == 0 or name != "alone":
                assert found[name][::2] == (error, True), name
                assert found[name][1].startswith(message), name


def test_where_memory_ends_on_one_all_recompute_more(processes: Processes) -> None:
    """In the backward of one process, when the others are in theirs: the second attempt gives what none would have failed with."""
    for found in processes("slicing", 2)[1]:
        assert found["again"] == (pytest.approx(found["good"][0], rel=1e-6), 2)
        assert found["good"][1]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (4, 1), (14, 2), (32, 8), (6, 6), (8, 4)])
def test_every_head_is_computed_once_beside_those_that_it_shares(heads: int, shared: int, count: int) -> None:
    shares = share_heads(heads, shared, count)
    assert [head for part in shares.heads for head in range(heads)[part]] == list(range(heads))
    counts = [part.stop - part.start for part in shares.heads]
    assert max(counts) - min(counts) <= (heads // shared if shared >= count else 1)
    for own, theirs, places in zip(shares.heads, shares.shared, shares.places, strict=True):
        wanted = [head // (heads // shared) for head in range(heads)[own]]
        there = list(range(shared)[theirs])
        assert there == sorted(set(wanted))
        repeated = [each for each in there for _ in range(len(wanted) // len(there))] if places is None and there else []
        assert (repeated if places is None else [there[place] for place in places]) == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slices_cover_a_sequence(count: int) -> None:
    slices = slices_of(50, count)
    assert [token for part in slices for token in range(50)[part]] == list(range(50))
    lengths = [part.stop - part.start for part in slices]
    assert max(lengths) - min(lengths) <= 1
