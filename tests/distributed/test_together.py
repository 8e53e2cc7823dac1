"""Processes that step together take the step of one that has all their gradients, or none of them takes it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import datum, load, random_tokens, renderer
from tests.distributed.devices import ON_GPUS, here, require_devices
from tests.distributed.stepping import FREE_BYTES, KINDS, LIMITED, PASSES, SETTINGS, STEPS, accumulate, fresh, state
from tests.extent import slow
from tests.running import START_S
from tinsmith.config import DistributedConfig, TrainingConfig
from tinsmith.models.machine import Machine
from tinsmith.plan import make_plan
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.backend import LocalBackend

ROOT = Path(__file__).parents[2]

Found = list[dict[str, Any]]
"""What each process has found."""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory, family_dir: Callable[[str], Path]) -> Callable[[int], Found]:
    """What so many processes have found. They run on first use."""

    @cache
    def run(count: int) -> Found:
        require_devices(count)
        directory = tmp_path_factory.mktemp(f"{count} processes")
        files = [directory / f"{rank}.pt" for rank in range(count)]
        ranks = [
            (str(rank), str(count), f"file://{directory}/meeting", str(file), str(family_dir("qwen3"))) for rank, file in enumerate(files)
        ]
        running = [subprocess.Popen([sys.executable, "-m", "tests.distributed.stepping", *arguments], cwd=ROOT) for arguments in ranks]
        try:
            assert [process.wait(START_S) for process in running] == [0] * count, directory
        finally:
            for process in running:
                process.kill()
        return [torch.load(file, map_location="cpu", weights_only=True) for file in files]

    return run


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_all_have_the_same_bits_after_each_step(processes: Callable[[int], Found], kind: str, dtype: torch.dtype, count: int) -> None:
    """With gradients of several passes here, of one there, and none at all elsewhere."""
    steps = [found[f"{kind} {dtype}"] for found in processes(count)]
    for step in range(STEPS):
        _, metrics, expected = steps[0][step]
        for rank, of_process in enumerate(steps):
            totals, its_metrics, weights = of_process[step]
            assert (totals is None) == (PASSES[rank, step] == 0)
            assert its_metrics == metrics
            assert same(weights, expected)
    assert not same(steps[0][0][2], steps[0][1][2])


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_two_take_the_step_of_one_that_was_given_the_sum(processes: Callable[[int], Found], kind: str, dtype: torch.dtype) -> None:
    """To the last bit: two float32 numbers have one sum, which is rounded to bfloat16 where gradients are kept in that."""
    first, second = (found[f"{kind} {dtype}"] for found in processes(2))
    alone = fresh(kind, dtype)
    for (one, metrics, weights), (other, _, _) in zip(first, second, strict=True):
        given = [totals for totals in (one, other) if totals is not None]
        kept_in = dtype if kind == "compact" else torch.float32
        totals = [sum((part.float() for part in parts), torch.zeros(())).to(kept_in) for parts in zip(*given, strict=True)]
        alone.totals = [total.to(here()) for total in totals]
        assert alone.step(SETTINGS) == metrics
        assert same(state(alone), weights)


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_they_stay_close_to_one_that_computed_all_passes(
    processes: Callable[[int], Found], kind: str, dtype: torch.dtype, count: int
) -> None:
    """A step moves a weight by about the learning rate times the share of its gradient in the norm of its history.

    Sums in another order differ by a few times 2^-24 of their largest term, and the divisor is of the size of the terms: 2^-20 of three
    steps. A compact state rounds moments to 8 bits, a sum in bfloat16 has 8 bits too, and both are rounded by chance: a few times 2^-7.
    """
    alone = fresh(kind, dtype)
    for step in range(STEPS):
        for rank in range(count):
            accumulate(alone, rank, step)
        alone.step(SETTINGS)
    after = processes(count)[0][f"{kind} {dtype}"][-1][2]
    masters = len(alone.weights.tensors())
    near = 2.0**-4 if kind == "compact" else 2.0**-20
    for expected, found in zip(state(alone)[:masters], after[:masters], strict=True):
        torch.testing.assert_close(found, expected, atol=STEPS * SETTINGS.lr * near, rtol=2.0**-23)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_zeros_lie_in_memory_as_gradients_do(kind: str, dtype: torch.dtype) -> None:
    """NCCL adds up only what lies so; weights of a base model may be transposed."""
    zeros, accumulated = fresh(kind, dtype), fresh(kind, dtype)
    zeros.begin_with_zeros()
    accumulate(accumulated, 0, 0)
    for zero, total in zip(zeros.totals or [], accumulated.totals or [], strict=True):
        assert (zero.shape, zero.dtype, zero.stride()) == (total.shape, total.dtype, total.stride())
        assert not zero.any()


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_numbers_are_gathered_and_tensors_summed_up(processes: Callable[[int], Found], count: int) -> None:
    for found in processes(count):
        summed, numbers, large = found["sums"]
        assert summed == [count * (count + 1) / 2] * 3
        assert numbers == [rank * 7 - 1 for rank in range(count)]
        assert large == [[2**62 + rank, -(2**62)][rank % 2] for rank in range(count)]


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_whatever_passes_exchange_arrives(processes: Callable[[int], Found], count: int) -> None:
    ranks = range(count)
    for rank, found in enumerate(processes(count)):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            assert torch.equal(found[f"joined {dtype}"], torch.tensor([[each, each + 10] for each in ranks]).view(-1).to(dtype))
        part, joined = found["two at once"]
        assert part.tolist() == [sum(ranks, count) * number for number in (2 * rank, 2 * rank + 1)]
        assert joined.tolist() == [each for each in ranks for _ in range(3)]
        assert found["column"].tolist() == [100 * each + 3 * rank for each in ranks]
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(found[f"neighbour {dtype}"], torch.tensor([rank - 1] * 2 if rank else [], dtype=dtype))
        assert found["texts"] == ["ä" * each for each in ranks]


@pytest.mark.parametrize("kind", ["lora", "compact"])
def test_without_gradients_nothing_moves(processes: Callable[[int], Found], kind: str) -> None:
    for found in processes(2):
        error, _, metrics, unchanged, cleared, again = found[f"nothing {kind}"]
        assert (error, metrics, unchanged, cleared) == ("NoneType", {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}, True, True)
        assert again > 0


@pytest.mark.parametrize("kind", ["lora", "compact"])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_a_gradient_that_is_not_finite_on_one_is_refused_on_all(processes: Callable[[int], Found], kind: str, bad: str) -> None:
    seen = set()
    for found in processes(2):
        error, text, _, unchanged, cleared, again = found[f"{bad} {kind}"]
        assert (error, unchanged, cleared) == ("UserError", True, True)
        assert text.startswith(f"the gradient norm is {bad}: the step was refused, the gradients are cleared and the weights stay")
        seen.add(again)
    assert len(seen) == 1  # what comes next is the same step on all


@pytest.mark.parametrize("kind", ["lora", "compact"])
def test_a_step_for_which_one_lacks_memory_is_refused_on_all(processes: Callable[[int], Found], kind: str) -> None:
    first, second = (found[f"no memory {kind}"] for found in processes(2))
    assert first[0] == "TinsmithError"
    assert first[1].startswith("the step was refused, the gradients are cleared and the weights stay as they were: another worker has no")
    assert second[:2] == ("OutOfMemoryError", "out of memory")
    for _, _, _, unchanged, cleared, again in (first, second):
        assert (unchanged, cleared) == (True, True)
        assert again == first[-1] > 0


@pytest.mark.parametrize("kind", ["lora", "compact"])
def test_a_step_for_which_all_lack_memory_is_refused_as_that_of_one(processes: Callable[[int], Found], kind: str) -> None:
    for found in processes(2):
        assert found[f"no memory in a step {kind}"][:2] == ("OutOfMemoryError", "no")


@pytest.mark.parametrize("kind", ["lora", "compact"])
@pytest.mark.parametrize("case", ["failed alone", "failed otherwise", "another norm", "another weight"])
def test_a_step_that_only_some_took_ends_all(processes: Callable[[int], Found], kind: str, case: str) -> None:
    """Whatever kind of error it is: one that does not answer would let the others wait."""
    for rank, found in enumerate(processes(2)):
        error, text, *_ = found[f"{case} {kind}"]
        assert error == "DeviceLostError"
        assert text.startswith(f"worker {rank} of 2 took another step than the others, or none where they took one: ")


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_passes_that_are_divided_train_a_model_as_those_of_one_worker(
    processes: Callable[[int], Found], family_dir: Callable[[str], Path], count: int
) -> None:
    """Also where one computes all of a step. Rows packed with others round in another order: within 1e-5, a thousandth of a step."""
    base = load(family_dir("qwen3"))
    alone = LocalBackend(base, TrainingConfig(logits_chunk=64))
    alone.create_model("m", LoraShape(4, 0))
    before = state(alone.optimizers["m"])
    for step in range(STEPS):
        work = [datum("m", renderer(base).render([random_tokens(10 * step + i, 9 + 5 * i)])) for i in range(4)]
        assert alone.run_pass(work, backward=True).failures == {}
        alone.optim_step("m", SETTINGS)
    found = [of_process["trained"] for of_process in processes(count)]
    assert all(same(found[0], other) for other in found[1:])
    expected = state(alone.optimizers["m"])
    masters = len(alone.optimizers["m"].weights.tensors())
    assert not same(before[:masters], expected[:masters])
    for one, other in zip(expected[:masters], found[0][:masters], strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-5)


def test_a_step_of_a_model_that_is_not_on_all_ends_all_and_lets_none_wait(processes: Callable[[int], Found]) -> None:
    for found in processes(2):
        assert found["missing"] == ("NotFoundError", "model m is not loaded; create it anew")
        lost = "the workers are not the same any more: whether model m is there is [1, 0], by rank"
        assert found["missing on some"] == ("DeviceLostError", lost)


@pytest.mark.skipif(ON_GPUS, reason="it is about the memory of a host whose CPUs the workers share")
@pytest.mark.parametrize("count", [2, *slow(3)])
def test_each_trains_as_long_a_sequence_as_the_plan_says(
    processes: Callable[[int], Found], family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each with its part of the host's memory, as the one counts that found least of it."""
    directory = str(family_dir("qwen3"))
    weights = sum(parameter.nbytes for parameter in load(family_dir("qwen3"), device="cpu").network.parameters())
    monkeypatch.setattr("tinsmith.plan.look_around", partial(Machine, 2, 2**40, FREE_BYTES + count * weights, [], "there is none"))
    config = replace(LIMITED, base_models=[f"tiny={directory}"], distributed=DistributedConfig(workers=count))
    planned = make_plan(config, 32, None)
    assert planned.cache is not None
    assert 0 < planned.longest_sequence.tokens < 1024
    longest = planned.longest_sequence
    assert longest.tokens < longest.together
    assert (planned.modes[0].longest_sequence, planned.modes[0].longest_together) == (longest.tokens, longest.together)
    for found in processes(count):
        assert found["memory"] == (longest.tokens, longest.together, planned.cache.bytes)


@pytest.mark.parametrize("count", [2, *slow(3)])
def test_who_finds_the_others_gone_says_so(processes: Callable[[int], Found], count: int) -> None:
    error, text = processes(count)[0]["alone"]
    assert error == "WorkersLostError"
    assert text.startswith(f"worker 0 of {count} cannot reach the others: ")
