"""Processes that step together take the step of one that has all their gradients, or none of them takes it.

Each is `python -m tests.distributed.test_together RANK COUNT DIRECTORY`; a tiny model is DIRECTORY/bases/text.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bases import load
from tests.distributed.conftest import Processes
from tests.distributed.devices import ON_GPUS, Member, here
from tests.extent import slow
from tinsmith.config import Config, DistributedConfig, ModelsConfig, SamplingConfig, TrainingConfig
from tinsmith.distributed.joint_work import JointWork
from tinsmith.errors import DeviceLostError, TinsmithError
from tinsmith.memory.plan import make_plan
from tinsmith.models.full import new_compact_weights, new_full_weights
from tinsmith.models.lora import Adapter, LoraPair
from tinsmith.models.machine import Machine
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training import together
from tinsmith.training.backend import LocalBackend
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.together import step_together

SETTINGS = AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, grad_clip_norm=1.5)
KINDS = [(kind, dtype) for kind in ("lora", "full", "strided", "compact") for dtype in (torch.float32, torch.bfloat16)]
STEPS = 3
PASSES = {(0, 0): 2, (1, 0): 1, (2, 0): 1, (0, 1): 1, (1, 1): 0, (2, 1): 2, (0, 2): 0, (1, 2): 3, (2, 2): 0}
"""How many passes a worker computes before a step, by its rank and the number of the step."""
FREE_BYTES = 42 * 2**20
"""Of a host, when all workers have loaded their base model."""
LIMITED = Config(
    models=ModelsConfig(device="cpu", dtype="float32", max_context=1024),
    sampling=SamplingConfig(kv_cache_gib=8 / 1024),
    training=TrainingConfig(logits_chunk=64),
)
"""With a cache that leaves memory for some sequences."""


def fresh(kind: str, dtype: torch.dtype) -> Optimizer:
    """An optimizer of a few hundred random weights, the same in every process."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(here())

    if kind == "lora":
        pairs = {name: LoraPair(random(2, 50), random(40, 2)) for name in ("up", "down")}
        return ModelOptimizer(Adapter(LoraShape(2, 0), pairs, dtype, device=here()))
    masters = {"embed.weight": random(17, 15), "norm.weight": random(30)}
    if kind == "compact":
        return CompactOptimizer(new_compact_weights(LoraShape(0, 0), masters, dtype, here(), "compact"), "compact")
    if kind == "strided":  # as a base model may have them
        masters["embed.weight"] = masters["embed.weight"].t()
    return ModelOptimizer(new_full_weights(LoraShape(0, 0), masters, dtype))


def gradients(optimizer: Optimizer, rank: int, step: int, number: int) -> list[Tensor | None]:
    """Those of one pass, in the precision of the base. Some passes do not reach all weights."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    found: list[Tensor | None] = [torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in optimizer.weights.leaves()]
    if number == 1:
        found[0] = None
    return found


def accumulate(optimizer: Optimizer, rank: int, step: int) -> None:
    """Add the gradients of all passes of a worker before a step."""
    for number in range(PASSES[rank, step]):
        optimizer.contribution(gradients(optimizer, rank, step, number))()


def state(optimizer: Optimizer) -> list[Tensor]:
    """Copies of all that a step changes."""
    weights = optimizer.weights
    return [tensor.detach().to("cpu", copy=True) for tensor in (*weights.tensors(), *weights.leaves(), *dict(optimizer.moments()).values())]


def copied(totals: list[Tensor] | None) -> list[Tensor] | None:
    return None if totals is None else [total.to("cpu", copy=True) for total in totals]


class Stepping(Member):
    """One process that steps with others."""

    def equal_steps(self) -> None:
        for kind, dtype in KINDS:
            optimizer = fresh(kind, dtype)
            steps = []
            for step in range(STEPS):
                accumulate(optimizer, self.rank, step)
                totals = copied(optimizer.totals)
                metrics = step_together(optimizer, SETTINGS, self.group)
                assert optimizer.totals is None
                steps.append((totals, metrics, state(optimizer)))
            self.found[f"{kind} {dtype}"] = steps

    def trial(self, name: str, kind: str, prepare: Callable[[Optimizer], None]) -> None:
        """A step that `prepare` spoils, then one that nothing is wrong with."""
        optimizer = fresh(kind, torch.bfloat16)
        accumulate(optimizer, self.rank, 0)
        step_together(optimizer, SETTINGS, self.group)
        before = state(optimizer)
        prepare(optimizer)
        error: Exception | None = None
        metrics: dict[str, float] = {}
        try:
            metrics = step_together(optimizer, SETTINGS, self.group)
        except Exception as raised:  # noqa: BLE001 - the test looks at it
            error = raised
        unchanged = all(torch.equal(one, other) for one, other in zip(before, state(optimizer), strict=True))
        cleared = optimizer.totals is None
        vars(optimizer).pop("step", None)
        vars(optimizer).pop("begin_with_zeros", None)
        optimizer.clear()
        accumulate(optimizer, self.rank, 0)
        again = None if isinstance(error, DeviceLostError) else step_together(optimizer, SETTINGS, self.group)["grad_norm"]
        self.found[f"{name} {kind}"] = type(error).__name__, str(error), metrics, unchanged, cleared, again

    def refused_steps(self) -> None:
        for kind in ("lora", "compact"):
            self.trial("nothing", kind, lambda optimizer: None)
            for bad in ("nan", "inf"):
                self.trial(bad, kind, partial(self.spoil, bad=float(bad)))
            self.trial("no memory", kind, self.without_memory)
            self.trial(
                "no memory in a step", kind, lambda optimizer: self.failing(optimizer, torch.OutOfMemoryError("no"), everywhere=True)
            )
            self.trial("failed alone", kind, lambda optimizer: self.failing(optimizer, torch.OutOfMemoryError("no")))
            self.trial("failed otherwise", kind, lambda optimizer: self.failing(optimizer, MemoryError("no")))
            self.trial("another norm", kind, self.with_another_norm)
            self.trial("another weight", kind, self.with_another_weight)

    def spoil(self, optimizer: Optimizer, bad: float) -> None:
        """The second worker has a gradient that is not finite."""
        found = [gradient for gradient in gradients(optimizer, self.rank, 0, 0) if gradient is not None]
        if self.rank == 1:
            found[1].view(-1)[3] = bad
        optimizer.contribution(found)()

    def without_memory(self, optimizer: Optimizer) -> None:
        """The second worker has no gradients, and no memory for zeros in their place."""

        def begin_with_zeros() -> None:
            raise torch.OutOfMemoryError("out of memory")

        if self.rank == 1:
            optimizer.begin_with_zeros = begin_with_zeros  # type: ignore[method-assign]
        else:
            accumulate(optimizer, self.rank, 0)

    def failing(self, optimizer: Optimizer, error: Exception, everywhere: bool = False) -> None:
        """The second worker, or all, cannot take the step once the gradients are added up."""

        def step(settings: AdamSettings) -> dict[str, float]:
            optimizer.clear()
            raise error

        accumulate(optimizer, self.rank, 0)
        if self.rank == 1 or everywhere:
            optimizer.step = step  # type: ignore[method-assign]

    def with_another_norm(self, optimizer: Optimizer) -> None:
        """The second worker takes a step with a gradient that differs in its last bit."""
        take = optimizer.step
        accumulate(optimizer, self.rank, 0)
        if self.rank == 1:
            optimizer.step = lambda settings: take(settings) | {"grad_norm": 1.0 + 2**-52}  # type: ignore[method-assign]

    def with_another_weight(self, optimizer: Optimizer) -> None:
        """The second worker has a weight that differs in its last bit."""
        accumulate(optimizer, self.rank, 0)
        if self.rank == 1:
            weights = optimizer.weights
            tensor = weights.flat.view(torch.int32) if isinstance(weights, Adapter) else weights.leaves()[0].detach().view(torch.int16)
            tensor.view(-1)[5] ^= 1

    def exchanges(self) -> None:
        """Every kind that passes use: of bytes and numbers, of nothing, of what lies apart in memory, and two under way at once."""
        group, rank, count, device = self.group, self.rank, self.count, self.group.device
        tensor = torch.full((3,), float(rank + 1), device=device)
        group.sum(tensor)
        largest = [2**62 + rank, -(2**62)][rank % 2]
        self.found["sums"] = tensor.tolist(), group.gather(rank * 7 - 1), group.gather(largest)
        for dtype in (torch.uint8, torch.bfloat16, torch.float32):
            whole = torch.empty(2 * count, dtype=dtype, device=device)
            group.begin_to_join(whole, torch.tensor([rank, rank + 10], device=device).to(dtype))()
            self.found[f"joined {dtype}"] = whole.cpu()
        joined, part = torch.empty(3 * count, device=device), torch.empty(2, device=device)
        waits = [group.begin_to_sum_parts(part, torch.arange(2.0 * count, device=device) * (rank + 1))]
        waits += [group.begin_to_join(joined, torch.full((3,), float(rank), device=device))]
        for wait in waits:
            wait()
        self.found["two at once"] = part.cpu(), joined.cpu()
        joint = JointWork(group, lambda error: False)
        column = (torch.arange(3.0 * count, device=device).view(count, 3) + 100 * rank)[:, :1].reshape(-1)
        self.found["column"] = joint.exchange(column, [1] * count, [1] * count).cpu()
        to_the_next = [2 * (other == rank + 1) for other in range(count)]
        of_the_last = [2 * (other == rank - 1) for other in range(count)]
        for dtype in (torch.bfloat16, torch.float32):
            sent = torch.full((sum(to_the_next),), float(rank), dtype=dtype, device=device)
            self.found[f"neighbour {dtype}"] = joint.exchange(sent, to_the_next, of_the_last).cpu()
        self.found["texts"] = group.texts("ä" * rank)

    def lacks_a_model(self) -> None:
        """A step of a model that is nowhere, then of one that the first worker alone has."""
        backend = LocalBackend(load(self.directory / "bases" / "text", device=str(here())), TrainingConfig(logits_chunk=64), self.group)
        for name in ("missing", "missing on some"):
            try:
                backend.optim_step("m", SETTINGS)
            except TinsmithError as error:
                self.found[name] = type(error).__name__, str(error)
            if self.rank == 0:
                backend.create_model("m", LoraShape(4, 0))

    def memory(self) -> None:
        """How long a sequence trains, on a host with little free memory, of which the later workers find more."""
        from tinsmith.worker import device_memory

        device_memory.free_memory = lambda device: FREE_BYTES + self.rank * 2**20  # type: ignore[attr-defined]
        base = load(self.directory / "bases" / "text", device="cpu", max_context=1024)
        memory = device_memory.DeviceMemory({"tiny": base}, LIMITED, self.group)
        together = max(memory.longest_trained("tiny"), memory.longest_together("tiny", self.count))
        self.found["memory"] = memory.longest_trained("tiny"), together, memory.budgets["tiny"].cache

    def alone(self) -> None:
        """All but the first end without a word; the first notices when it next needs them."""
        if self.rank:
            os._exit(0)
        optimizer = fresh("lora", torch.float32)
        accumulate(optimizer, 0, 0)
        try:
            step_together(optimizer, SETTINGS, self.group)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.found["alone"] = type(error).__name__, str(error)


def main() -> None:
    """Go through all cases; the last one ends all processes but the first."""
    together.PIECE = 100  # so that sums in a narrow precision go through several pieces, the last of which is not full
    stepping = Stepping()
    stepping.equal_steps()
    stepping.exchanges()
    stepping.refused_steps()
    stepping.lacks_a_model()
    if not ON_GPUS:
        stepping.memory()
    stepping.save()
    stepping.alone()
    stepping.save()
    os._exit(0)  # the others are gone: there is nobody to take leave of


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


@pytest.mark.parametrize("count", [2, *slow(3)])  # test_divided.py has three, with uneven shares
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_all_have_the_same_bits_after_each_step_and_stay_close_to_one(
    processes: Processes, kind: str, dtype: torch.dtype, count: int
) -> None:
    """With gradients of several passes here, of one there, and none at all elsewhere. One has computed all passes.

    A step moves a weight by about the learning rate times the share of its gradient in the norm of its history. Sums in another order
    differ by a few times 2^-24 of their largest term, and the divisor is of the size of the terms: 2^-20 of three steps. A compact state
    rounds moments to 8 bits, a sum in bfloat16 has 8 bits too, and both are rounded by chance: a few times 2^-7.
    """
    steps = [found[f"{kind} {dtype}"] for found in processes("test_together", count)[1]]
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
    first, second = (found[f"{kind} {dtype}"] for found in processes("test_together", 2)[1])
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


@pytest.mark.parametrize("count", [2, *slow(3)])  # test_divided.py has three, with uneven shares
def test_whatever_workers_exchange_arrives(processes: Processes, count: int) -> None:
    ranks = range(count)
    for rank, found in enumerate(processes("test_together", count)[1]):
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
    for found in processes("test_together", 2)[1]:
        error, _, metrics, unchanged, cleared, again = found[f"nothing {kind}"]
        assert (error, metrics, unchanged, cleared) == ("NoneType", {"grad_norm": 0.0, "learning_rate": SETTINGS.lr}, True, True)
        assert again > 0


@pytest.mark.parametrize("kind", ["lora", "compact"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_one_cannot_take_is_refused_on_all(processes: Processes, kind: str, case: str) -> None:
    """What comes next is the same step on all."""
    _, both = processes("test_together", 2)
    for found, expected in zip(both, REFUSED[case], strict=True):
        error, text, _, unchanged, cleared, again = found[f"{case} {kind}"]
        assert (error, text[: len(expected[1])]) == expected
        assert (unchanged, cleared) == (True, True)
        assert again == both[0][f"{case} {kind}"][-1] > 0


@pytest.mark.parametrize("kind", ["lora", "compact"])
@pytest.mark.parametrize("case", ["failed alone", "failed otherwise", "another norm", "another weight"])
def test_a_step_that_only_some_took_ends_all(processes: Processes, kind: str, case: str) -> None:
    """Whatever kind of error it is: one that does not answer would let the others wait."""
    for rank, found in enumerate(processes("test_together", 2)[1]):
        error, text, *_ = found[f"{case} {kind}"]
        assert error == "DeviceLostError"
        assert text.startswith(f"worker {rank} of 2 took another step than the others, or none where they took one: ")


def test_a_step_of_a_model_that_is_not_on_all_ends_all_and_lets_none_wait(processes: Processes) -> None:
    """Who finds the others gone says so."""
    for found in processes("test_together", 2)[1]:
        assert found["missing"] == ("NotFoundError", "model m is not loaded; create it anew")
        lost = "the workers are not the same any more: whether model m is there is [1, 0], by rank"
        assert found["missing on some"] == ("DeviceLostError", lost)
    error, text = processes("test_together", 2)[1][0]["alone"]
    assert error == "WorkersLostError"
    assert text.startswith("worker 0 of 2 cannot reach the others: ")


@pytest.mark.skipif(ON_GPUS, reason="it is about the memory of a host whose CPUs the workers share")
def test_each_trains_as_long_a_sequence_as_the_plan_says(processes: Processes, bases: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its part of the host's memory, as the one counts that found least of it."""
    weights = sum(parameter.nbytes for parameter in load(bases / "text", device="cpu").network.parameters())
    monkeypatch.setattr("tinsmith.memory.plan.look_around", partial(Machine, 2, 2**40, FREE_BYTES + 2 * weights, [], "there is none"))
    config = replace(LIMITED, base_models=[f"tiny={bases / 'text'}"], distributed=DistributedConfig(workers=2))
    planned = make_plan(config, 32, None)
    assert planned.cache is not None
    longest = planned.longest_sequence
    assert 0 < longest.tokens < 1024
    assert longest.tokens < longest.together
    assert (planned.modes[0].longest_sequence, planned.modes[0].longest_together) == (longest.tokens, longest.together)
    for found in processes("test_together", 2)[1]:
        assert found["memory"] == (longest.tokens, longest.together, planned.cache.bytes)


if __name__ == "__main__":
    main()
