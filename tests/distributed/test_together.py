"""Processes that step together take the step of one that has all their gradients, or none of them takes it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bases import load
from tests.distributed.conftest import Processes
from tests.distributed.devices import ON_GPUS, here
from tests.distributed.stepping import FREE_BYTES, KINDS, LIMITED, PASSES, SETTINGS, STEPS, accumulate, fresh, state
from tests.extent import slow
from tinsmith.config import DistributedConfig
from tinsmith.models.machine import Machine
from tinsmith.plan import make_plan

STAYS = "the step was refused, the gradients are cleared and the weights stay"
REFUSED = {
    "nan": [("UserError", f"the gradient norm is nan: {STAYS}")] * 2,
    "inf": [("UserError", f"the gradient norm is inf: {STAYS}")] * 2,
    "no memory": [("TinsmithError", f"{STAYS} as they were: another worker has no"), ("OutOfMemoryError", "out of memory")],
    "no memory in a step": [("OutOfMemoryError", "no")] * 2,
}
"""What two workers say of a step that the second, or in the last case none, cannot take."""


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("count", [2, *slow(3)])
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_all_have_the_same_bits_after_each_step_and_stay_close_to_one(
    processes: Processes, kind: str, dtype: torch.dtype, count: int
) -> None:
    """With gradients of several passes here, of one there, and none at all elsewhere. One has computed all passes.

    A step moves a weight by about the learning rate times the share of its gradient in the norm of its history. Sums in another order
    differ by a few times 2^-24 of their largest term, and the divisor is of the size of the terms: 2^-20 of three steps. A compact state
    rounds moments to 8 bits, a sum in bfloat16 has 8 bits too, and both are rounded by chance: a few times 2^-7.
    """
    steps = [found[f"{kind} {dtype}"] for found in processes("stepping", count)[1]]
    alone = fresh(kind, dtype)
    for step in range(STEPS):
        _, metrics, expected = steps[0][step]
        for rank, of_process in enumerate(steps):
            totals, its_metrics, weights = of_process[step]
            assert (totals is None) == (PASSES[rank, step] == 0)
            assert its_metrics == metrics
            assert same(weights, expected)
            accumulate(alone, rank, step)
        alone.step(SETTINGS)
    assert not same(steps[0][0][2], steps[0][1][2])
    masters = len(alone.weights.tensors())
    near = 2.0**-4 if kind == "compact" else 2.0**-20
    for one, found in zip(state(alone)[:masters], steps[0][-1][2][:masters], strict=True):
        torch.testing.assert_close(found, one, atol=STEPS * SETTINGS.lr * near, rtol=2.0**-23)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_two_take_the_step_of_one_that_was_given_the_sum(processes: Processes, kind: str, dtype: torch.dtype) -> None:
    """To the last bit: two float32 numbers have one sum, which is rounded to bfloat16 where gradients are kept in that."""
    first, second = (found[f"{kind} {dtype}"] for found in processes("stepping", 2)[1])
    alone = fresh(kind, dtype)
    for (one, metrics, weights), (other, _, _) in zip(first, second, strict=True):
        given = [totals for totals in (one, other) if totals is not None]
        kept_in = dtype if kind == "compact" else torch.float32
        totals = [sum((part.float() for part in parts), torch.zeros(())).to(kept_in) for parts in zip(*given, strict=True)]
        alone.totals = [total.to(here()) for total in totals]
        assert alone.step(SETTINGS) == metrics
        assert same(state(alone), weights)


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
def test_whatever_workers_exchange_arrives(processes: Processes, count: int) -> None:
    ranks = range(count)
    for rank, found in enumerate(processes("stepping", count)[1]):
        summed, numbers, large = found["sums"]
        assert summed == [count * (count + 1) / 2] * 3
        assert numbers == [each * 7 - 1 for each in ranks]
        assert large == [[2**62 + each, -(2**62)][each % 2] for each in ranks]
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
def test_without_gradients_nothing_moves(processes: Processes, kind: str) -> None:
    for found in processes("stepping", 2)[1]:
        error, _, metrics, unchanged, cleared, again = found[f"nothing {kind}"]
        assert (error, metrics, unchanged, cleared) == ("NoneType", {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}, True, True)
        assert again > 0


@pytest.mark.parametrize("kind", ["lora", "compact"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_one_cannot_take_is_refused_on_all(processes: Processes, kind: str, case: str) -> None:
    """What comes next is the same step on all."""
    _, both = processes("stepping", 2)
    for found, expected in zip(both, REFUSED[case], strict=True):
        error, text, _, unchanged, cleared, again = found[f"{case} {kind}"]
        assert (error, text[: len(expected[1])]) == expected
        assert (unchanged, cleared) == (True, True)
        assert again == both[0][f"{case} {kind}"][-1] > 0


@pytest.mark.parametrize("kind", ["lora", "compact"])
@pytest.mark.parametrize("case", ["failed alone", "failed otherwise", "another norm", "another weight"])
def test_a_step_that_only_some_took_ends_all(processes: Processes, kind: str, case: str) -> None:
    """Whatever kind of error it is: one that does not answer would let the others wait."""
    for rank, found in enumerate(processes("stepping", 2)[1]):
        error, text, *_ = found[f"{case} {kind}"]
        assert error == "DeviceLostError"
        assert text.startswith(f"worker {rank} of 2 took another step than the others, or none where they took one: ")


def test_a_step_of_a_model_that_is_not_on_all_ends_all_and_lets_none_wait(processes: Processes) -> None:
    """Who finds the others gone says so."""
    for found in processes("stepping", 2)[1]:
        assert found["missing"] == ("NotFoundError", "model m is not loaded; create it anew")
        lost = "the workers are not the same any more: whether model m is there is [1, 0], by rank"
        assert found["missing on some"] == ("DeviceLostError", lost)
    error, text = processes("stepping", 2)[1][0]["alone"]
    assert error == "WorkersLostError"
    assert text.startswith("worker 0 of 2 cannot reach the others: ")


@pytest.mark.skipif(ON_GPUS, reason="it is about the memory of a host whose CPUs the workers share")
def test_each_trains_as_long_a_sequence_as_the_plan_says(processes: Processes, bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its part of the host's memory, as the one counts that found least of it."""
    weights = sum(parameter.nbytes for parameter in load(bases / "text", device="cpu").network.parameters())
    monkeypatch.setattr("tinsmith.plan.look_around", partial(Machine, 2, 2**40, FREE_BYTES + 2 * weights, [], "there is none"))
    config = replace(LIMITED, base_models=[f"tiny={bases / 'text'}"], distributed=DistributedConfig(workers=2))
    planned = make_plan(config, 32, None)
    assert planned.cache is not None
    longest = planned.longest_sequence
    assert 0 < longest.tokens < 1024
    assert longest.tokens < longest.together
    assert (planned.modes[0].longest_sequence, planned.modes[0].longest_together) == (longest.tokens, longest.together)
    for found in processes("stepping", 2)[1]:
        assert found["memory"] == (longest.tokens, longest.together, planned.cache.bytes)
