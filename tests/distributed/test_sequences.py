"""Processes that compute a sequence together give and learn what one does; what fails on one of them leaves nothing on any."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import load
from tests.distributed.devices import ROUNDING, require_devices
from tests.distributed.slicing import CASES, FAMILIES, LENGTHS, STEPS, train
from tests.extent import slow
from tests.running import START_S
from tinsmith.config import TrainingConfig
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.sequence_slices import share_heads, slices_of

ROOT = Path(__file__).parents[2]
WITHIN = 1e-5
"""Of the largest number of a tensor: sums over tokens are added up in another order."""
WITHIN_HYBRID = 5e-4 * ROUNDING
"""Of hybrid models. So much the gradients of the tiny one change if its weights change in their last bit: its delta nets hand on from token
to token what is rounded in another way. A token that is lost or counted twice changes them by a hundredth."""

Found = list[dict[str, Any]]
"""What each process has found."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory, family_dir: Callable[[str], Path]) -> Path:
    """A directory with the tiny models."""
    directory = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        (directory / family).symlink_to(family_dir(family))
    return directory


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, families: Path) -> Callable[[int], Found]:
    """What so many processes have found. They run on first use."""

    @cache
    def run(count: int) -> Found:
        require_devices(count)
        directory = tmp_path_factory.mktemp(f"{count} processes")
        files = [directory / f"{rank}.pt" for rank in range(count)]
        ranks = [(str(rank), str(count), f"file://{directory}/meeting", str(file), str(families)) for rank, file in enumerate(files)]
        running = [subprocess.Popen([sys.executable, "-m", "tests.distributed.slicing", *arguments], cwd=ROOT) for arguments in ranks]
        try:
            assert [process.wait(START_S) for process in running] == [0] * count, directory
        finally:
            for process in running:
                process.kill()
        return [torch.load(file, map_location="cpu", weights_only=True) for file in files]

    return run


@pytest.fixture(scope="module")
def alone(families: Path) -> Callable[[str], dict[str, Any]]:
    """What one worker finds in a case."""

    @cache
    def run(case: str) -> dict[str, Any]:
        base = load(families / CASES[case][0])
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
    processes: Callable[[int], Found], alone: Callable[[str], dict[str, Any]], case: str, count: int
) -> None:
    """Log-probabilities, losses, the gradient of every parameter, and weights, with short sequences that one process computes."""
    family, _, ranks = CASES[case]
    all_found = [found[case] for found in processes(count)]
    for key, expected in alone(case).items():
        of_each = [found[key] for found in all_found]
        within = WITHIN_HYBRID if family == "qwen3_5" else WITHIN
        if key.endswith("gradients"):
            for name, parts in enumerate(zip(expected, *of_each, strict=True)):
                assert parts[0].any(), (key, name)
                assert far(sum(parts[1:], torch.zeros(())), parts[0]) < within, (key, name)
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


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize("case", CASES)
def test_each_computes_its_slice_and_no_more(processes: Callable[[int], Found], case: str, count: int) -> None:
    found = processes(count)
    rows = [[row for row in each[f"{case} computed"] if row != 9] for each in found]  # without the short datums of the first
    assert len(rows[0]) == 2 * STEPS * len(CASES[case][2])
    for lengths in zip(*rows, strict=True):
        assert max(lengths) - min(lengths) <= 1
    if CASES[case][1] != "pictures":
        assert {sum(lengths) for lengths in zip(*rows, strict=True)} == set(LENGTHS)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_what_one_cannot_compute_fails_on_all_and_leaves_no_gradient(processes: Callable[[int], Found], count: int) -> None:
    expected = {
        "broken": ("UserError", "image 3 is broken"),
        "short": ("TinsmithError", f"a sequence of 20 tokens is too short to be divided among {count} workers"),
        "missing": ("NotFoundError", "model there is not loaded; create it anew"),
        "forward": ("TinsmithError", "the pass failed: RuntimeError: no kernel"),
        "backward": ("TinsmithError", "the pass failed: RuntimeError: no kernel"),
    }
    needs = f"a sequence of 97 tokens needs more memory than {count} workers together have left"
    expected["no memory"] = ("TinsmithError", f"the pass failed: {needs}: OutOfMemoryError: no memory")
    for found in processes(count):
        for name, (error, message) in expected.items():
            assert found[name] == (error, message, True), name


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_where_memory_ends_on_one_all_recompute_more(processes: Callable[[int], Found], count: int) -> None:
    """In the backward of one process, when the others are in theirs: the second attempt gives what none would have failed with."""
    for found in processes(count):
        assert found["again"] == (pytest.approx(found["good"][0], rel=1e-6), 2)
        assert found["good"][1]


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_processes_at_different_passes_end_instead_of_mixing_them(processes: Callable[[int], Found], count: int) -> None:
    for found in processes(count):
        error, message, clean = found["another pass"]
        assert (error, clean) == ("DeviceLostError", True)
        assert message.startswith("the workers are not the same any more: the pass that comes next is [")


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_who_finds_the_others_gone_in_the_middle_says_so(processes: Callable[[int], Found], count: int) -> None:
    error, message, clean = processes(count)[0]["alone"]
    assert (error, clean) == ("WorkersLostError", True)
    assert message.startswith(f"worker 0 of {count} cannot reach the others: ")


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
