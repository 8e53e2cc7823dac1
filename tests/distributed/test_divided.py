"""Processes that divide the layers of a base model train as one that has all of it, and each keeps its part alone."""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import load, write_decoder
from tests.distributed.devices import EXACT, EXACT_IN_HALF, ON_GPUS, require_devices
from tests.distributed.dividing import (
    FAULTS,
    PICTURES,
    SETTINGS,
    SHAPES,
    STEPS,
    TRAINING,
    computed,
    create_models,
    gradients,
    share_of,
    step_alone,
    step_of,
    take,
    work_of,
)
from tests.distributed.dividing import weights as weights_of
from tests.extent import slow
from tests.running import START_S
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import read_state, write_state

ROOT = Path(__file__).parents[2]
WITHIN = 1e-5
"""Of the largest number of a tensor: gradients are added up in another order."""
WITHIN_IN_ONE_PASS = 1e-3
"""At least, against a single pass of all datums: rows of other datums round otherwise, and how far that goes depends on the processor."""
HYBRID_WITHIN = 5e-3 if ON_GPUS else 1e-4
"""Delta nets hand on from token to token what is rounded otherwise; on a GPU that differs with every run."""

Found = list[dict[str, Any]]
"""What each process has found."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, family_dir: Callable[[str], Path]) -> Path:
    """The directories of tiny models: `text`, `image`, `hybrid`, and `deep`, which has many layers."""
    directory = tmp_path_factory.mktemp("bases")
    for name, family in {"text": "qwen3", "image": "qwen3_vl", "hybrid": "qwen3_5"}.items():
        (directory / name).symlink_to(family_dir(family))
    write_decoder("qwen3", directory / "deep", num_hidden_layers=8, head_dim=16)
    return directory


@pytest.fixture(scope="module")
def processes(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, Found]]:
    """What so many processes have found, and where. They run on first use."""

    @cache
    def run(count: int) -> tuple[Path, Found]:
        require_devices(count)
        directory = tmp_path_factory.mktemp(f"{count} processes")
        (directory / "bases").symlink_to(bases)
        write_state(saved_alone(bases), directory / "alone")
        command = [sys.executable, "-m", "tests.distributed.dividing"]
        running = [subprocess.Popen([*command, str(rank), str(count), str(directory)], cwd=ROOT) for rank in range(count)]
        try:
            assert [process.wait(START_S) for process in running] == [0] * count, directory
        finally:
            for process in running:
                process.kill()
        return directory, [torch.load(directory / f"{rank}.pt", map_location="cpu", weights_only=True) for rank in range(count)]

    return run


def saved_alone(bases: Path) -> Any:
    """A model that one worker has trained for a step."""
    backend = LocalBackend(load(bases / "text"), TRAINING)
    create_models(backend)
    step_of(backend, 0)
    return backend.copy_state("four", optimizer=True)


def assert_near(found: list[Tensor], expected: list[Tensor], within: float) -> None:
    for one, other in ((one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True)):
        assert (one - other).abs().max() <= within * other.abs().max()


def summed(of_workers: list[list[Tensor]]) -> list[Tensor]:
    """The gradients of all workers together; those without a share have none."""
    return [torch.stack(totals).sum(0) for totals in zip(*(each for each in of_workers if each), strict=True)]


TRAINED = [
    *((count, "text", "float32", WITHIN) for count in (2, 3)),
    (2, "image", "float32", WITHIN),
    *((count, "hybrid", "float32", HYBRID_WITHIN) for count in (2, 3)),
    *((count, "text", "replicas", WITHIN) for count in (2, 3)),
    (2, "image", "replicas", WITHIN),
    *slow((4, "image", "float32", WITHIN), (4, "text", "replicas", WITHIN), (4, "image", "replicas", WITHIN)),  # three are uneven too
]
"""How many processes train which base, dividing its layers in float32 or as replicas, and how near to one worker."""


@pytest.mark.parametrize(("count", "name", "how", "within"), TRAINED)
def test_losses_gradients_and_weights_are_those_of_one_worker(
    processes: Callable[[int], tuple[Path, Found]], bases: Path, count: int, name: str, how: str, within: float
) -> None:
    """Of two models of other ranks, also where one worker computes all of a step, or has one picture much larger than those of others."""
    _, found = processes(count)
    alone = LocalBackend(load(bases / name), TRAINING)
    create_models(alone)
    whole = LocalBackend(load(bases / name), TRAINING)
    create_models(whole)
    in_one_pass = computed(whole, work_of(whole.base, 0))
    for step in range(STEPS):
        expected = step_alone(alone, step, count)
        of_step = [of_process[f"{name} {how}"][step] for of_process in found]
        assert all(each["failures"] == {} for each in of_step)
        assert not any(expected["failures"])
        losses = [loss for each in of_step for loss in each["losses"]]
        # Weights of any sign cancel in a loss: its terms are of the size of the largest one.
        assert losses == pytest.approx(expected["losses"], rel=within, abs=within * max(map(abs, expected["losses"])))
        assert [len(each["losses"]) for each in of_step] == [len(share_of(range(6), step, rank, count)) for rank in range(count)]
        for model in SHAPES:
            total = summed([each[model] for each in of_step])
            if step == 0:
                assert_near(total, in_one_pass[model], max(within, WITHIN_IN_ONE_PASS))
            assert_near(total, expected[model], within)
            # B begins with zeros, so that A has no gradient before the first step. Every parameter has one later.
            there = [bool(gradient.any()) for gradient in expected[model]]
            assert [bool(gradient.any()) for gradient in total] == there
            assert sum(there) == (len(there) if step else len(there) // 2)
            for each in of_step:
                assert each["norms"][model] == pytest.approx(expected["norms"][model], rel=within)
                assert_near(each["weights"][model], expected["weights"][model], within)
        take(alone, of_step[0]["weights"])


def test_pictures_of_a_step_differ_in_size_from_worker_to_worker() -> None:
    """As many as 196 tokens here and several of a few there, with texts alone where there are more than two workers."""
    sizes = PICTURES[-1]
    for count in (2, 4):
        shares = [[sizes[place] for place in share_of(range(6), STEPS - 1, rank, count) if place in sizes] for rank in range(count)]
        assert shares == [[(448, 448)], [(64, 64), (96, 64), (64, 96)], *([] for _ in range(2, count))]


@pytest.mark.parametrize(("name", "dtype"), [("text", "float32"), ("image", "float32"), ("hybrid", "float32"), ("text", "bfloat16")])
def test_a_share_has_the_gradients_of_a_worker_with_all_weights(
    processes: Callable[[int], tuple[Path, Found]], bases: Path, name: str, dtype: str
) -> None:
    """To the last bit on a CPU, and every parameter has one: LoRA in float32 over a base in bfloat16 too."""
    _, found = processes(2)
    within = EXACT_IN_HALF if dtype == "bfloat16" else HYBRID_WITHIN if EXACT and name == "hybrid" else EXACT
    for rank, of_process in enumerate(found):
        backend = LocalBackend(load(bases / name, dtype=dtype), TRAINING)
        create_models(backend)
        backend.run_pass(share_of(work_of(backend.base, 0), 0, rank, 2), backward=True)
        steps = of_process[f"{name} {dtype}"]
        for model, expected in gradients(backend).items():
            assert_near(steps[0][model], expected, within)
            totals = [total for step in steps[1:] for total in step[model]]
            shares = [share_of(range(6), step, rank, 2) for step in range(1, STEPS)]
            reached = [step for step in shares if any(list(SHAPES)[place % 2] == model for place in step)]
            assert len(totals) == len(reached) * len(expected)
            assert all(total.any() for total in totals)
    first, second = (of_process[f"{name} {dtype}"][-1]["weights"] for of_process in found)
    assert all(torch.equal(one, other) for model in SHAPES for one, other in zip(first[model], second[model], strict=True))


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_each_keeps_its_part_of_the_layers_alone(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """Of 8 layers: what is freed is what the others keep, but for two buffers of the size of a layer."""
    slack = 8 * 32 * 64 * count  # tensors begin at multiples of 64 bytes, and parts are of one size
    for found in processes(count)[1]:
        before, after, layers, kept, buffers = found["keeps"]
        assert layers / count <= kept <= layers / count + slack
        assert layers / 4 <= buffers <= layers / 4 + slack
        assert abs(before - after - (layers - kept - buffers)) <= slack


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize(("kind", "where"), FAULTS)
def test_what_fails_on_one_alone_leaves_the_others_their_results(
    processes: Callable[[int], tuple[Path, Found]], count: int, kind: str, where: str
) -> None:
    """It goes on in halves there, as a worker alone does; the others put the layers together for it and wait for nothing else."""
    for rank, found in enumerate(processes(count)[1]):
        spoiled, whole = found[f"{kind} {where}"]
        assert spoiled["failures"] == whole["failures"] == {}
        assert spoiled["losses"] == pytest.approx(whole["losses"], rel=WITHIN)
        for model in SHAPES:
            assert_near(spoiled[model], whole[model], WITHIN if rank == 1 else EXACT)


def test_what_is_refused_lets_nobody_wait(processes: Callable[[int], tuple[Path, Found]]) -> None:
    for rank, found in enumerate(processes(2)[1]):
        missing = "model nobody is not loaded; create it anew"
        assert found["unknown"]["failures"] == ({0: missing, 1: missing} if rank == 0 else {})
        assert found["forward"]["failures"] == {}
        assert all(isinstance(loss, float) for loss in found["forward"]["losses"])
        assert [found[case][model] for case in ("unknown", "forward") for model in SHAPES] == [[]] * 4


def test_workers_that_were_told_of_different_passes_end(processes: Callable[[int], tuple[Path, Found]]) -> None:
    for found in processes(2)[1]:
        assert found["another pass"].startswith("the workers are not the same any more: the pass that comes next is [")


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_checkpoints_go_on_whatever_the_number_of_workers(processes: Callable[[int], tuple[Path, Found]], bases: Path, count: int) -> None:
    """From one worker to several, a step there, and back with moments and all."""
    directory, found = processes(count)
    backend = LocalBackend(load(bases / "text"), TRAINING)
    create_models(backend)
    backend.restore("four", read_state(directory / "alone", backend.base, optimizer=True))
    for of_process in found:
        assert_near(of_process["restored"], weights_of(backend, "four"), 0)
    for rank in range(count):
        backend.run_pass(share_of(work_of(backend.base, 1), 0, rank, count), backward=True)
    backend.optim_step("four", SETTINGS)
    for of_process in found:
        assert_near(of_process["went on"], weights_of(backend, "four"), WITHIN)
    expected = backend.copy_state("four", optimizer=True)
    saved = read_state(directory / "together", backend.base, optimizer=True)
    assert expected.moments
    assert saved.moments
    assert_near(list(saved.tensors.values()), list(expected.tensors.values()), WITHIN)
    assert_near([saved.moments[name] for name in expected.moments], list(expected.moments.values()), WITHIN)
    backend.restore("four", saved)
    assert_near(weights_of(backend, "four"), found[0]["went on"], 0)
