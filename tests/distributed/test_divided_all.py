"""Processes that divide all weights of models train as one that has all of them, and each keeps its part alone."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bases import load, write_decoder
from tests.distributed.devices import EXACT_IN_HALF, ON_GPUS, require_devices
from tests.distributed.dividing import SETTINGS, TRAINING
from tests.distributed.dividing_all import (
    FAULTS,
    FULL,
    SHAPES,
    STEPS,
    computed,
    create_models,
    gradients,
    share_of,
    step_alone,
    step_of,
    take,
    weights,
    work_of,
)
from tests.extent import slow
from tests.running import START_S
from tinsmith.models.full import divided_full_bytes
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
        backend = LocalBackend(load(directory / "bases" / "text"), TRAINING)
        create_models(backend)
        step_of(backend, 0)
        write_state(backend.copy_state("all", optimizer=True), directory / "alone")
        command = [sys.executable, "-m", "tests.distributed.dividing_all"]
        running = [subprocess.Popen([*command, str(rank), str(count), str(directory)], cwd=ROOT) for rank in range(count)]
        try:
            assert [process.wait(START_S) for process in running] == [0] * count, directory
        finally:
            for process in running:
                process.kill()
        return directory, [torch.load(directory / f"{rank}.pt", map_location="cpu", weights_only=True) for rank in range(count)]

    return run


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].cpu() - tensor.cpu()).abs().max() <= within * tensor.abs().max(), name


@pytest.mark.parametrize(
    ("count", "name", "within"), [(2, "text", WITHIN), *slow((3, "text", WITHIN)), (2, "image", WITHIN), (2, "hybrid", HYBRID_WITHIN)]
)
def test_losses_gradients_and_weights_are_those_of_one_worker(
    processes: Callable[[int], tuple[Path, Found]], bases: Path, count: int, name: str, within: float
) -> None:
    """Of several models in the same passes, also where one worker computes all of a step. Each parameter counts once in the norm."""
    _, found = processes(count)
    alone = LocalBackend(load(bases / name), TRAINING)
    create_models(alone)
    whole = LocalBackend(load(bases / name), TRAINING)
    create_models(whole)
    in_one_pass = computed(whole, work_of(whole.base, 0))
    for step in range(STEPS):
        expected = step_alone(alone, step, count)
        of_step = [of_process[f"{name} float32"][step] for of_process in found]
        assert all(each["failures"] == {} for each in of_step)
        assert not any(expected["failures"])
        losses = [loss for each in of_step for loss in each["losses"]]
        # Weights of any sign cancel in a loss: its terms are of the size of the largest one.
        assert losses == pytest.approx(expected["losses"], rel=within, abs=within * max(map(abs, expected["losses"])))
        assert [len(each["losses"]) for each in of_step] == [len(share_of(range(6), step, rank, count)) for rank in range(count)]
        for each in of_step:
            for model in FULL:
                assert_near(each["gradients"][model], expected["gradients"][model], within)
                if step == 0:
                    assert_near(each["gradients"][model], in_one_pass["gradients"][model], max(within, WITHIN_IN_ONE_PASS))
            for model in SHAPES:
                assert each["norms"][model] == pytest.approx(expected["norms"][model], rel=within)
                assert_near(each["weights"][model], expected["weights"][model], within)
        take(alone, of_step[0]["weights"])
    assert all(total.any() for model in FULL for total in expected["gradients"][model].values())  # none whose gradient shows nothing


def test_gradients_in_half_precision_are_added_up_in_float32(processes: Callable[[int], tuple[Path, Found]], bases: Path) -> None:
    """Of what each share gives on a worker with all weights; and workers have the same weights afterwards."""
    _, found = processes(2)
    backend = LocalBackend(load(bases / "text", dtype="bfloat16"), TRAINING)
    create_models(backend)
    for rank in range(2):
        mine = share_of(work_of(backend.base, 0), 0, rank, 2)
        backend.run_pass(mine[::2], backward=True)
        backend.run_pass(mine[1::2], backward=True)
    for of_process in found:
        for model, expected in gradients(backend).items():
            assert_near(of_process["text bfloat16"][0]["gradients"][model], expected, max(1e-6, EXACT_IN_HALF))
    first, second = (of_process["text bfloat16"][-1]["weights"] for of_process in found)
    for model in SHAPES:
        assert_near(first[model], second[model], 0)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_each_keeps_its_part_alone(processes: Callable[[int], tuple[Path, Found]], bases: Path, count: int) -> None:
    """Of masters and moments; what lies around the layers is whole as well. It is no more than what was to be taken."""
    base = load(bases / "deep")
    sizes = [sum(parameter.numel() for parameter in base.language_model.layers[index].parameters()) for index in range(8)]
    targets = base.full_targets(SHAPES["all"])
    around = sum(parameter.numel() for parameter in targets.values()) - sum(sizes)
    needed = divided_full_bytes(sizes, around, torch.float32, count)
    slack = 4 * 64 * count * 12  # rows end at multiples of 64 numbers for each worker
    for found in processes(count)[1]:
        held, told, promised, parameters = found["keeps"]
        assert parameters == sum(sizes) + around
        expected = 4 * (parameters / count + around + max(sizes))  # masters, whole tensors, the buffer of sums
        assert expected <= told <= expected + slack
        assert told <= held <= told + slack
        assert 0 <= needed.device - told - promised <= slack
        assert abs(found["remembers"] - needed.moments) <= slack


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize(("kind", "where"), FAULTS)
def test_what_fails_on_one_alone_counts_nothing_twice(
    processes: Callable[[int], tuple[Path, Found]], count: int, kind: str, where: str
) -> None:
    """All compute the attempt again; what failed goes on in halves. So nobody loses a gradient either."""
    for found in processes(count)[1]:
        spoiled, whole = found[f"{kind} {where}"]
        assert spoiled["failures"] == whole["failures"] == {}
        assert spoiled["losses"] == pytest.approx(whole["losses"], rel=WITHIN)
        for model in FULL:
            assert_near(spoiled["gradients"][model], whole["gradients"][model], WITHIN)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_a_worker_without_memory_lets_nobody_wait(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """What it has no room for is refused on all workers, and weights stay as they were."""
    for rank, found in enumerate(processes(count)[1]):
        lacking = found["no room for gradients"]
        assert lacking["gradients"]["all"] == {}
        assert lacking["gradients"]["headless"]  # another model, in the same pass
        mine = share_of(list(range(6)), 0, rank, count)
        assert sorted(lacking["failures"]) == [place for place, index in enumerate(mine) if index % 3 == 0]
        for case in ("claim_moments", "_checked"):
            error, cleared = found[f"no room in {case}"]
            assert error == f"TinsmithError: worker 1 of {count}: out of memory"
            assert cleared
        assert found["no room for a model"] == (f"TinsmithError: worker 1 of {count}: out of memory", False)
        error, cleared = found["nan"]
        assert error.startswith("UserError: the gradient norm is nan")
        assert cleared
        error, cleared = found["overflow"]
        assert error.startswith("UserError: worker ")  # whichever has the part that would not stay finite
        assert "the update is not finite" in error
        assert cleared
        assert_near(found["unchanged"][1], found["unchanged"][0], 0)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_a_first_step_without_memory_on_one_leaves_all_without_moments(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """A save that found them on some workers alone would let these wait for the others."""
    directory, found = processes(count)
    assert load_file(directory / "saved at first" / "optimizer.safetensors") == {}
    assert len({of_process["first step"] for of_process in found}) == 1
    norm, moments = found[0]["first step"]
    assert norm > 0
    assert moments > 0


def test_what_this_mode_does_not_do_is_refused_by_name(processes: Callable[[int], tuple[Path, Found]]) -> None:
    for found in processes(2)[1]:
        assert "train_mlp=False and lora_config.rank=0: a server with --shard weights trains whole layers" in found["train_mlp"]
        assert "train_attn=False and lora_config.rank=0" in found["train_attn"]
        assert "it takes no --full-state compact; serve with --full-state float32, or with --shard none" in found["compact"]
        assert "save them with save_weights_for_sampler" in found["snapshot"]
        assert found["forward"]["failures"] == {}
        assert all(isinstance(loss, float) for loss in found["forward"]["losses"])
        assert found["forward"]["gradients"] == {name: {} for name in FULL}
        assert found["no gradients"] == {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_a_snapshot_has_the_weights_of_its_time(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """On the first worker alone, to the last bit: those of all workers, of one step, also after others."""
    _, (first, *others) = processes(count)
    for name in ("first snapshot", "later snapshot"):
        assert all(of_process[name] == {model: ("", {}) for model in SHAPES} for of_process in others)
        for model in SHAPES:
            precision, tensors = first[name][model]
            assert precision == "torch.float32"
            assert_near(tensors, first[f"{name} of"][model], 0)
    for model in FULL:
        assert_near(first["first snapshot, read again"][model], first["first snapshot of"][model], 0)
        assert any(
            not torch.equal(tensor, first["later snapshot"][model][1][name]) for name, tensor in first["first snapshot"][model][1].items()
        )


def test_a_snapshot_in_half_precision_is_what_passes_read(processes: Callable[[int], tuple[Path, Found]]) -> None:
    _, (first, _) = processes(2)
    precision, tensors = first["snapshot in bfloat16"]
    assert precision == "torch.bfloat16"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert_near(tensors, {name: master.to(torch.bfloat16) for name, master in first["snapshot in bfloat16 of"].items()}, 0)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_a_snapshot_that_fails_on_one_lets_nobody_wait(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """Nor does a model that could not be sampled: nobody creates it."""
    for found in processes(count)[1]:
        assert found["no room for a snapshot"] == f"TinsmithError: worker 0 of {count}: out of memory"
        assert found["no such model"].startswith("NotFoundError: model nobody is not loaded")
        assert found["cannot be sampled"] == f"UserError: worker 0 of {count}: vLLM has no such adapters"


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_checkpoints_go_on_whatever_the_number_of_workers(processes: Callable[[int], tuple[Path, Found]], bases: Path, count: int) -> None:
    """From one worker to several, a step there, and back with moments and all."""
    directory, found = processes(count)
    backend = LocalBackend(load(bases / "text"), TRAINING)
    create_models(backend)
    backend.restore("all", read_state(directory / "alone", backend.base, optimizer=True))
    for of_process in found:
        assert_near(of_process["restored"], weights(backend)["all"], 0)
    for rank in range(count):
        backend.run_pass(share_of(work_of(backend.base, 1), 0, rank, count), backward=True)
    backend.optim_step("all", SETTINGS)
    for of_process in found:
        assert_near(of_process["went on"], weights(backend)["all"], WITHIN)
    expected = backend.copy_state("all", optimizer=True)
    saved = read_state(directory / "together", backend.base, optimizer=True)
    assert expected.moments
    assert saved.moments
    assert_near(saved.tensors, expected.tensors, WITHIN)
    assert_near({name: saved.moments[name] for name in expected.moments}, expected.moments, 5 * WITHIN)  # some are squares
    backend.restore("all", saved)
    assert_near(weights(backend)["all"], found[0]["went on"], 0)
    assert read_state(directory / "weights alone", backend.base).tensors.keys() == saved.tensors.keys()


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_the_files_are_those_of_one_worker_byte_for_byte(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """Also if all take a step while they write, and whether they are said to be on one host or on several."""
    directory, _ = processes(count)
    backend = LocalBackend(load(directory / "bases" / "text", device="cpu"), TRAINING)
    assert contents(directory / "again") == contents(directory / "alone")
    for name, optimizer in (("together", True), ("weights alone", False), ("saved at first", True)):
        backend.restore("one", read_state(directory / name, backend.base, optimizer))
        write_state(backend.copy_state("one", optimizer), directory / f"{name} of one")
        assert contents(directory / name) == contents(directory / f"{name} of one")
    assert contents(directory / "weights alone").keys() == {"adapter.safetensors", "checkpoint.json"}


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_each_writes_its_part_alone(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    """Of masters and moments: that of one worker is as large as that of another, but for what is written once."""
    for name in ("again", "together", "weights alone"):
        parts = [found[f"{name} bytes"] for found in processes(count)[1]]
        whole = parts[0][1]
        assert sum(own for own, _ in parts) == whole
        slack = 30_000  # headers, and the numbers that fill up the rows of the last worker
        assert all(abs(own - whole / count) < slack for own, _ in parts), parts


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_a_copy_that_one_has_no_memory_for_is_refused_on_all(processes: Callable[[int], tuple[Path, Found]], count: int) -> None:
    for found in processes(count)[1]:
        assert found["no room for a copy"] == f"TinsmithError: worker 1 of {count}: out of memory"
        assert found["no such model"].startswith("NotFoundError: model nobody is not loaded")
