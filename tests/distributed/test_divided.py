"""Processes that divide the weights of models, or are replicas, train as one that has all of them, and each keeps its part alone."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bases import load
from tests.distributed.conftest import Processes
from tests.distributed.devices import EXACT, EXACT_IN_HALF, ON_GPUS
from tests.distributed.dividing import (
    FAULTS,
    FULL,
    LORA,
    PICTURES,
    SAVED,
    SETTINGS,
    SHAPES,
    STEPS,
    TRAINING,
    computed,
    create_models,
    share_computed,
    share_of,
    step_alone,
    take,
    weights,
    work_of,
)
from tests.extent import slow
from tinsmith.models.full import divided_full_bytes
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import read_state, write_state

WITHIN = 1e-5
"""Of the largest number of a tensor: gradients are added up in another order."""
WITHIN_IN_ONE_PASS = 1e-3
"""At least, against a single pass of all datums: rows of other datums round otherwise, and how far that goes depends on the processor."""
HYBRID_WITHIN = 5e-3 if ON_GPUS else 1e-4
"""Delta nets hand on from token to token what is rounded otherwise; on a GPU that differs with every run."""
OUT_OF_MEMORY = "TinsmithError: worker 1 of 2: out of memory"


def assert_near(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], within: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].cpu() - tensor.cpu()).abs().max() <= within * tensor.abs().max(), name


def summed(of_workers: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients of all workers together; those without a share have none."""
    there = [each for each in of_workers if each]
    return {name: torch.stack([each[name] for each in there]).sum(0) for name in there[0]}


def backend_of(directory: Path, **options: Any) -> LocalBackend:
    """A worker that has all weights of all models."""
    backend = LocalBackend(load(directory, **options), TRAINING)
    create_models(backend)
    return backend


TRAINED = [
    *((2, name, "float32", WITHIN) for name in ("text", "image")),
    (3, "text", "float32", WITHIN),  # shares and parts are uneven
    (2, "hybrid", "float32", HYBRID_WITHIN),
    *((2, name, "replicas", WITHIN) for name in ("text", "image")),
    *slow((3, "image", "float32", WITHIN), (3, "text", "replicas", WITHIN)),  # three with text are uneven too
]
"""How many processes train which base, dividing its layers in float32 or as replicas, and how near to one worker."""


@pytest.mark.parametrize(("count", "name", "how", "within"), TRAINED)
def test_losses_gradients_and_weights_are_those_of_one_worker(
    processes: Processes, bases: Path, count: int, name: str, how: str, within: float
) -> None:
    """Of several models in the same passes, also where one worker computes all of a step, or has one picture much larger than others.

    Each parameter counts once in the norm.
    """
    _, found = processes("dividing", count)
    alone, whole = backend_of(bases / name), backend_of(bases / name)
    in_one_pass = computed(whole, work_of(whole.base, 0))["gradients"]
    for step in range(STEPS):
        expected = step_alone(alone, step, count)
        of_step = [of_process[f"{name} {how}"][step] for of_process in found]
        assert all(each["failures"] == {} for each in of_step)
        assert not any(expected["failures"])
        losses = [loss for each in of_step for loss in each["losses"]]
        # Weights of any sign cancel in a loss: its terms are of the size of the largest one.
        assert losses == pytest.approx(expected["losses"], rel=within, abs=within * max(map(abs, expected["losses"])))
        assert [len(each["losses"]) for each in of_step] == [len(share_of(range(8), step, rank, count)) for rank in range(count)]
        for model in SHAPES:
            totals = [each["gradients"][model] for each in of_step]
            if how != "replicas" and model in FULL:
                for other in totals[1:]:
                    assert_near(other, totals[0], 0)  # they have added them up
                totals = totals[:1]
            total = summed(totals)
            if step == 0:
                assert_near(total, in_one_pass[model], max(within, WITHIN_IN_ONE_PASS))
            assert_near(total, expected["gradients"][model], within)
            # B begins with zeros, so that A has no gradient before the first step. Every parameter has one later.
            there = [bool(gradient.any()) for gradient in total.values()]
            assert sum(there) == (len(there) // 2 if step == 0 and model in LORA else len(there))
            for each in of_step:
                assert each["norms"][model] == pytest.approx(expected["norms"][model], rel=within)
                assert_near(each["weights"][model], expected["weights"][model], within)
                assert_near(each["weights"][model], of_step[0]["weights"][model], 0)
        take(alone, of_step[0]["weights"])


def test_pictures_of_a_step_differ_in_size_from_worker_to_worker() -> None:
    """As many as 196 tokens here and several of a few there, with texts alone where there are more than two workers."""
    sizes = PICTURES[-1]
    for count in (2, 3):
        shares = [[sizes[place] for place in share_of(range(8), STEPS - 1, rank, count) if place in sizes] for rank in range(count)]
        assert shares == [[(448, 448)], [(64, 64), (96, 64), (64, 96)], *([] for _ in range(2, count))]


@pytest.mark.parametrize(("name", "dtype"), [("text", "float32"), ("image", "float32"), ("hybrid", "float32"), ("text", "bfloat16")])
def test_a_share_has_the_gradients_of_a_worker_with_all_weights(processes: Processes, bases: Path, name: str, dtype: str) -> None:
    """To the last bit on a CPU where each worker adds up its own: LoRA in float32 over a base in bfloat16 too.

    Gradients in half precision of all weights are added up in float32.
    """
    _, found = processes("dividing", 2)
    within = EXACT_IN_HALF if dtype == "bfloat16" else HYBRID_WITHIN if EXACT and name == "hybrid" else EXACT
    together = backend_of(bases / name, dtype=dtype)
    for rank, of_process in enumerate(found):
        backend = backend_of(bases / name, dtype=dtype)
        expected = share_computed(backend, 0, rank, 2)["gradients"]
        for model in LORA:
            assert_near(of_process[f"{name} {dtype}"][0]["gradients"][model], expected[model], within)
        of_all = share_computed(together, 0, rank, 2)["gradients"]
    for of_process in found:
        for model in FULL:
            near = max(within, 1e-6 if dtype == "bfloat16" else HYBRID_WITHIN if name == "hybrid" else WITHIN)
            assert_near(of_process[f"{name} {dtype}"][0]["gradients"][model], of_all[model], near)
    first, second = (of_process[f"{name} {dtype}"][-1]["weights"] for of_process in found)
    for model in SHAPES:
        assert_near(first[model], second[model], 0)


@pytest.mark.parametrize("count", [2, 3])
def test_each_keeps_its_part_alone(processes: Processes, bases: Path, count: int) -> None:
    """Of 8 layers: what is freed is what the others keep, but for two buffers of the size of a layer.

    And of a model's masters and moments; what lies around the layers is whole as well. It is no more than what was to be taken.
    """
    base = load(bases / "deep")
    sizes = [sum(parameter.numel() for parameter in base.language_model.layers[index].parameters()) for index in range(8)]
    around = sum(parameter.numel() for parameter in base.full_targets(SHAPES["all"]).values()) - sum(sizes)
    needed = divided_full_bytes(sizes, around, torch.float32, count)
    for found in processes("dividing", count)[1]:
        before, after, layers, kept, buffers = found["keeps layers"]
        slack = 8 * 32 * 64 * count  # tensors begin at multiples of 64 bytes, and parts are of one size
        assert layers / count <= kept <= layers / count + slack
        assert layers / 4 <= buffers <= layers / 4 + slack
        assert abs(before - after - (layers - kept - buffers)) <= slack
        held, told, promised, parameters = found["keeps a model"]
        slack = 4 * 64 * count * 12  # rows end at multiples of 64 numbers for each worker
        assert parameters == sum(sizes) + around
        expected = 4 * (parameters / count + around + max(sizes))  # masters, whole tensors, the buffer of sums
        assert expected <= told <= expected + slack
        assert told <= held <= told + slack
        assert 0 <= needed.device - told - promised <= slack
        assert abs(found["remembers"] - needed.moments) <= slack


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize("where", FAULTS)
@pytest.mark.parametrize("kind", ["memory", "other"])
def test_what_fails_on_one_alone_counts_nothing_twice_and_loses_nothing(processes: Processes, count: int, kind: str, where: str) -> None:
    """It goes on in halves there, as a worker alone does; the others put the layers together for it and wait for nothing else.

    Of a model whose weights are divided all compute the attempt again.
    """
    for rank, found in enumerate(processes("dividing", count)[1]):
        spoiled, whole = found[f"{kind} {where}"]
        assert spoiled["failures"] == whole["failures"] == {}
        assert spoiled["losses"] == pytest.approx(whole["losses"], rel=WITHIN)
        for model in SHAPES:
            within = EXACT if model in LORA and rank != 1 and "all" not in where else WITHIN
            assert_near(spoiled["gradients"][model], whole["gradients"][model], within)


def test_a_worker_without_memory_lets_nobody_wait(processes: Processes) -> None:
    """What it has no room for is refused on all workers, and weights stay as they were."""
    for rank, found in enumerate(processes("dividing", 2)[1]):
        lacking = found["no room for gradients"]
        assert lacking["gradients"]["all"] == {}
        assert lacking["gradients"]["headless"]  # another model, in the same pass
        mine = share_of([tuple(SHAPES)[place % 4] for place in range(8)], 0, rank, 2)
        assert sorted(lacking["failures"]) == [place for place, model in enumerate(mine) if model == "all"]
        for case in ("claim_moments", "_checked"):
            assert found[f"no room in {case}"] == (OUT_OF_MEMORY, True)
        assert found["no room for a model"] == (OUT_OF_MEMORY, False)
        assert found["no room for a copy"] == OUT_OF_MEMORY
        for case, says in (("nan", "UserError: the gradient norm is nan"), ("overflow", "UserError: worker ")):
            error, cleared = found[case]
            assert error.startswith(says)  # whichever has the part that would not stay finite
            assert cleared
        assert "the update is not finite" in found["overflow"][0]
        assert_near(found["unchanged"][1], found["unchanged"][0], 0)


def test_a_first_step_without_memory_on_one_leaves_all_without_moments(processes: Processes) -> None:
    """A save that found them on some workers alone would let these wait for the others."""
    directory, found = processes("dividing", 2)
    assert load_file(directory / "saved at first" / "optimizer.safetensors") == {}
    assert len({of_process["first step"] for of_process in found}) == 1
    norm, moments = found[0]["first step"]
    assert norm > 0
    assert moments > 0


def test_what_is_refused_lets_nobody_wait(processes: Processes) -> None:
    """By name, and workers that were told of different passes end."""
    for rank, found in enumerate(processes("dividing", 2)[1]):
        missing = "model nobody is not loaded; create it anew"
        assert found["unknown"]["failures"] == ({0: missing, 1: missing} if rank == 0 else {})
        for case in ("no such model to copy", "no such model to sample"):
            assert found[case].startswith("NotFoundError: model nobody is not loaded")
        assert "train_mlp=False and lora_config.rank=0: a server with --shard weights trains whole layers" in found["train_mlp"]
        assert "train_attn=False and lora_config.rank=0" in found["train_attn"]
        assert "it takes no --full-state compact; serve with --full-state float32, or with --shard none" in found["compact"]
        assert "save them with save_weights_for_sampler" in found["snapshot"]
        assert found["forward"]["failures"] == {}
        assert all(isinstance(loss, float) for loss in found["forward"]["losses"])
        assert found["forward"]["gradients"] == found["unknown"]["gradients"] == {name: {} for name in SHAPES}
        assert found["no gradients"] == {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}
        assert found["another pass"].startswith("the workers are not the same any more: the pass that comes next is [")


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_a_snapshot_has_the_weights_of_its_time(processes: Processes, count: int) -> None:
    """On the first worker alone, to the last bit: those of all workers, of one step, also after others.

    One that fails on a worker lets nobody wait, nor does a model that could not be sampled: nobody creates it.
    """
    _, (first, *others) = processes("dividing", count)
    for name in ("first snapshot", "later snapshot"):
        assert all(of_process[name] == {model: ("", {}) for model in SHAPES} for of_process in others)
        for model in SHAPES:
            precision, tensors = first[name][model]
            assert precision == "torch.float32"
            assert_near(tensors, first[f"{name} of"][model], 0)
    for model in FULL:
        taken = first["first snapshot"][model][1]
        assert_near(first["first snapshot, read again"][model], taken, 0)
        assert any(not torch.equal(tensor, first["later snapshot"][model][1][name]) for name, tensor in taken.items())
    for found in (first, *others):
        assert found["no room for a snapshot"] == f"TinsmithError: worker 0 of {count}: out of memory"
        assert found["cannot be sampled"] == f"UserError: worker 0 of {count}: vLLM has no such adapters"


def test_a_snapshot_in_half_precision_is_what_passes_read(processes: Processes) -> None:
    _, (first, _) = processes("dividing", 2)
    precision, tensors = first["snapshot in bfloat16"]
    assert precision == "torch.bfloat16"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert_near(tensors, {name: master.to(torch.bfloat16) for name, master in first["snapshot in bfloat16 of"].items()}, 0)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_checkpoints_go_on_whatever_the_number_of_workers(processes: Processes, bases: Path, count: int) -> None:
    """From one worker to several, a step there, and back with moments and all."""
    directory, found = processes("dividing", count)
    backend = backend_of(bases / "text")
    for name in SAVED:
        backend.restore(name, read_state(directory / f"{name} alone", backend.base, optimizer=True))
    restored = weights(backend, *SAVED)
    for rank in range(count):
        backend.run_pass(share_of(work_of(backend.base, 1), 0, rank, count), backward=True)
    for name in SAVED:
        backend.optim_step(name, SETTINGS)
        for of_process in found:
            assert_near(of_process["restored"][name], restored[name], 0)
            assert_near(of_process["went on"][name], weights(backend, name)[name], WITHIN)
        expected = backend.copy_state(name, optimizer=True)
        saved = read_state(directory / f"{name} together", backend.base, optimizer=True)
        assert expected.moments
        assert saved.moments
        assert_near(saved.tensors, expected.tensors, WITHIN)
        assert_near({key: saved.moments[key] for key in expected.moments}, expected.moments, 5 * WITHIN)  # some are squares
        backend.restore(name, saved)
        assert_near(weights(backend, name)[name], found[0]["went on"][name], 0)


@pytest.mark.parametrize("count", [2, 3])
def test_the_files_are_those_of_one_worker_byte_for_byte(processes: Processes, count: int) -> None:
    """Also if all take a step while they write, and whether they are said to be on one host or on several.

    Each writes its part alone: that of one worker is as large as that of another, but for what is written once.
    """
    directory, found = processes("dividing", count)
    backend = LocalBackend(load(directory / "bases" / "text", device="cpu"), TRAINING)
    assert contents(directory / "all again") == contents(directory / "all alone")
    for name, optimizer in (("all together", True), ("weights alone", False), ("saved at first", True)):
        backend.restore("one", read_state(directory / name, backend.base, optimizer))
        write_state(backend.copy_state("one", optimizer), directory / f"{name} of one")
        assert contents(directory / name) == contents(directory / f"{name} of one")
    assert contents(directory / "weights alone").keys() == {"adapter.safetensors", "checkpoint.json"}
    for name in ("all again", "all together", "weights alone"):
        parts = [of_process[f"{name} bytes"] for of_process in found]
        whole = parts[0][1]
        assert sum(own for own, _ in parts) == whole
        slack = 30_000  # headers, and the numbers that fill up the rows of the last worker
        assert all(abs(own - whole / count) < slack for own, _ in parts), parts


def contents(directory: Path) -> dict[str, bytes]:
    """The files of a directory."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}
