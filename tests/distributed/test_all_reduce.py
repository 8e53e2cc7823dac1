"""Processes that step together take the step of one that has all their gradients, or none of them takes it."""

import itertools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.distributed.devices import ON_GPUS, here
from tests.distributed.members import Member, in_processes
from tests.extent import slow
from tinsmith.config import Config, DistributedConfig, ModelsConfig, SamplingConfig, TrainingConfig
from tinsmith.errors import DeviceLostError, NotFoundError, TinsmithError, UserError, WorkersLostError
from tinsmith.memory.plan import make_plan
from tinsmith.models.full import new_compact_weights, new_full_weights
from tinsmith.models.lora import Adapter, LoraPair, adapter_of
from tinsmith.models.machine import Machine
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import LocalBackend
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.paged_state import StatePager
from tinsmith.training.parallel import all_reduce
from tinsmith.training.parallel.all_reduce import all_reduce_step
from tinsmith.training.parallel.joint_work import JointWork
from tinsmith.worker.device_memory import DeviceMemory

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
        return ModelOptimizer(adapter_of(LoraShape(2, 0), pairs, dtype, device=here()))
    masters = {"embed.weight": random(17, 15), "norm.weight": random(30)}
    if kind == "compact":
        return CompactOptimizer(new_compact_weights(LoraShape(0, 0), masters, dtype, here(), "compact"), "compact")
    if kind == "strided":  # as a base model may have them
        masters["embed.weight"] = masters["embed.weight"].t()
    return ModelOptimizer(new_full_weights(LoraShape(0, 0), masters, dtype))


def gradients(optimizer: Optimizer, rank: int, step: int, number: int) -> list[Tensor | None]:
    """Those of one pass, in the precision of the base. Some passes do not reach all weights."""
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + number)
    found: list[Tensor | None] = [
        torch.randn(leaf.shape, generator=generator).to(leaf) for leaf in optimizer.weights.leaves()
    ]
    if number == 1:
        found[0] = None
    return found


def accumulate(optimizer: Optimizer, rank: int, step: int) -> None:
    """Add the gradients of all passes of a worker before a step."""
    for number in range(PASSES[rank, step]):
        optimizer.accumulator.contribution(gradients(optimizer, rank, step, number))()


def state(optimizer: Optimizer) -> list[Tensor]:
    """Copies of all that a step changes."""
    weights = optimizer.weights
    return [
        tensor.detach().to("cpu", copy=True)
        for tensor in (*weights.tensors(), *weights.leaves(), *dict(optimizer.moments()).values())
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@in_processes(2, *slow(3))  # test_sharded.py has three, with uneven shares
def test_a_step_of_all_is_that_of_one_that_was_given_all_gradients(member: Member) -> None:
    """With gradients of several passes here, of one there, and none at all elsewhere.

    All have the same bits after each step.

    To the last bit if one is given the sum of two: two float32 numbers have one sum, which is rounded to bfloat16 where
    gradients are kept in that. If it computes all passes, a step moves a weight by about the learning rate times the
    share of its gradient in the norm of its history. Sums in another order differ by a few times 2^-24 of their largest
    term, and the divisor is of the size of the terms: 2^-20 of three steps. A compact state rounds moments to 8 bits, a
    sum in bfloat16 has 8 bits too, both by chance: a few times 2^-7.
    """
    for kind, dtype in KINDS:
        own, given, alone = (fresh(kind, dtype) for _ in range(3))
        first = None
        for step in range(STEPS):
            accumulate(own, member.rank, step)
            of_each = [totals for totals in member.of_all(own.accumulator.totals) if totals is not None]
            assert len(of_each) == sum(PASSES[rank, step] > 0 for rank in range(member.count))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(all_reduce, "PIECE", 100)  # sums in a narrow precision go through several
                metrics = all_reduce_step(own, SETTINGS, member.group)
            assert own.accumulator.totals is None
            for its_metrics, its_weights in member.of_all((metrics, state(own))):
                assert its_metrics == metrics
                assert same(its_weights, state(own))
            first = first or state(own)
            if member.count == 2:
                kept_in = dtype if kind == "compact" else torch.float32
                sums = [sum((part.float() for part in parts), torch.zeros(())) for parts in zip(*of_each, strict=True)]
                given.accumulator.totals = [total.to(kept_in).to(here()) for total in sums]
                assert given.step(SETTINGS) == metrics
                assert same(state(given), state(own))
            for rank in range(member.count):
                accumulate(alone, rank, step)
            alone.step(SETTINGS)
        assert not same(first or [], state(own))
        near = 2.0**-4 if kind == "compact" else 2.0**-20
        for expected, found in zip(alone.weights.tensors(), own.weights.tensors(), strict=True):
            torch.testing.assert_close(found, expected, atol=STEPS * SETTINGS.lr * near, rtol=2.0**-23)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_zeros_lie_in_memory_as_gradients_do(kind: str, dtype: torch.dtype) -> None:
    """NCCL adds up only what lies so; weights of a base model may be transposed."""
    zeros, accumulated = fresh(kind, dtype), fresh(kind, dtype)
    zeros.accumulator.begin_with_zeros()
    accumulate(accumulated, 0, 0)
    for zero, total in zip(zeros.accumulator.totals or [], accumulated.accumulator.totals or [], strict=True):
        assert (zero.shape, zero.dtype, zero.stride()) == (total.shape, total.dtype, total.stride())
        assert not zero.any()


@in_processes(2, *slow(3))
def test_whatever_workers_exchange_arrives(member: Member) -> None:
    """Bytes and numbers, nothing, what lies apart in memory, and two exchanges under way at once."""
    group, rank, count, device = member.group, member.rank, member.count, member.group.device
    ranks = range(count)
    tensor = torch.full((3,), float(rank + 1), device=device)
    group.all_reduce(tensor)
    assert tensor.tolist() == [count * (count + 1) / 2] * 3
    assert group.gather(rank * 7 - 1) == [each * 7 - 1 for each in ranks]
    assert group.gather([2**62 + rank, -(2**62)][rank % 2]) == [[2**62 + each, -(2**62)][each % 2] for each in ranks]
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        whole = torch.empty(2 * count, dtype=dtype, device=device)
        group.begin_all_gather(whole, torch.tensor([rank, rank + 10], device=device).to(dtype))()
        assert whole.tolist() == [number for each in ranks for number in (each, each + 10)]
    joined, part = torch.empty(3 * count, device=device), torch.empty(2, device=device)
    waits = [group.begin_reduce_scatter(part, torch.arange(2.0 * count, device=device) * (rank + 1))]
    waits += [group.begin_all_gather(joined, torch.full((3,), float(rank), device=device))]
    for wait in waits:
        wait()
    assert part.tolist() == [sum(ranks, count) * number for number in (2 * rank, 2 * rank + 1)]
    assert joined.tolist() == [each for each in ranks for _ in range(3)]
    joint = JointWork(group)
    column = (torch.arange(3.0 * count, device=device).view(count, 3) + 100 * rank)[:, :1].reshape(-1)
    assert joint.all_to_all(column, [1] * count, [1] * count).tolist() == [100 * each + 3 * rank for each in ranks]
    to_the_next, of_the_last = ([2 * (other == neighbour) for other in ranks] for neighbour in (rank + 1, rank - 1))
    for dtype in (torch.bfloat16, torch.float32):
        sent = torch.full((sum(to_the_next),), float(rank), dtype=dtype, device=device)
        assert joint.all_to_all(sent, to_the_next, of_the_last).tolist() == ([rank - 1] * 2 if rank else [])
    assert group.texts("ä" * rank) == ["ä" * each for each in ranks]


Spoils = Callable[[Member, Optimizer, pytest.MonkeyPatch], None]


def not_finite(bad: float) -> Spoils:
    """The second worker has a gradient that is not finite."""

    def spoil(member: Member, optimizer: Optimizer, patch: pytest.MonkeyPatch) -> None:
        found = [gradient for gradient in gradients(optimizer, member.rank, 0, 0) if gradient is not None]
        if member.rank == 1:
            found[1].view(-1)[3] = bad
        optimizer.accumulator.contribution(found)()

    return spoil


def without_memory(member: Member, optimizer: Optimizer, patch: pytest.MonkeyPatch) -> None:
    """The second worker has no gradients, and no memory for zeros in their place."""

    def begin_with_zeros() -> None:
        raise torch.OutOfMemoryError("out of memory")

    if member.rank == 1:
        patch.setattr(optimizer.accumulator, "begin_with_zeros", begin_with_zeros)
    else:
        accumulate(optimizer, member.rank, 0)


def failing(error: Exception, everywhere: bool = False) -> Spoils:
    """The second worker, or all, cannot take the step once the gradients are added up."""

    def spoil(member: Member, optimizer: Optimizer, patch: pytest.MonkeyPatch) -> None:
        def step(settings: AdamSettings) -> dict[str, float]:
            optimizer.accumulator.take()
            raise error

        accumulate(optimizer, member.rank, 0)
        if member.rank == 1 or everywhere:
            patch.setattr(optimizer, "step", step)

    return spoil


def with_another_norm(member: Member, optimizer: Optimizer, patch: pytest.MonkeyPatch) -> None:
    """The second worker takes a step with a gradient that differs in its last bit."""
    take = optimizer.step
    accumulate(optimizer, member.rank, 0)
    if member.rank == 1:
        patch.setattr(optimizer, "step", lambda settings: take(settings) | {"grad_norm": 1.0 + 2**-52})


def with_another_weight(member: Member, optimizer: Optimizer, patch: pytest.MonkeyPatch) -> None:
    """The second worker has a weight that differs in its last bit."""
    accumulate(optimizer, member.rank, 0)
    if member.rank == 1:
        weights = optimizer.weights
        tensor = (
            weights.flat.view(torch.int32)
            if isinstance(weights, Adapter)
            else weights.leaves()[0].detach().view(torch.int16)
        )
        tensor.view(-1)[5] ^= 1


STAYS = "the step was refused, the gradients are cleared and the weights stay"
REFUSED: list[tuple[Spoils, list[tuple[type[Exception], str]]]] = [
    (not_finite(math.nan), [(UserError, f"the gradient norm is nan: {STAYS}")] * 2),
    (not_finite(math.inf), [(UserError, f"the gradient norm is inf: {STAYS}")] * 2),
    (
        without_memory,
        [(TinsmithError, f"{STAYS} as they were: another worker has no"), (torch.OutOfMemoryError, "out of memory")],
    ),
    (failing(torch.OutOfMemoryError("no"), everywhere=True), [(torch.OutOfMemoryError, "no")] * 2),
]
"""What two workers say of a step that the second, or in the last case none, cannot take."""
APART: list[Spoils] = [
    failing(torch.OutOfMemoryError("no")),
    failing(MemoryError("no")),
    with_another_norm,
    with_another_weight,
]
"""What lets only some take a step, or another one."""


def begun(member: Member, kind: str) -> Optimizer:
    """An optimizer behind its first step."""
    optimizer = fresh(kind, torch.bfloat16)
    accumulate(optimizer, member.rank, 0)
    all_reduce_step(optimizer, SETTINGS, member.group)
    return optimizer


@in_processes(2)
def test_a_step_that_one_cannot_take_is_refused_on_all(member: Member) -> None:
    """What comes next is the same step on all. Without gradients nothing moves."""
    for kind, (spoil, expected) in itertools.product(("lora", "compact"), [(None, None), *REFUSED]):
        optimizer = begun(member, kind)
        before = state(optimizer)
        if spoil is None or expected is None:
            assert all_reduce_step(optimizer, SETTINGS, member.group) == {
                "grad_norm": 0.0,
                "learning_rate": SETTINGS.lr,
            }
        else:
            error, text = expected[member.rank]
            with pytest.MonkeyPatch.context() as patch:
                spoil(member, optimizer, patch)
                with pytest.raises(error, match=text):
                    all_reduce_step(optimizer, SETTINGS, member.group)
        assert same(before, state(optimizer))
        assert optimizer.accumulator.totals is None
        accumulate(optimizer, member.rank, 0)
        again = all_reduce_step(optimizer, SETTINGS, member.group)["grad_norm"]
        assert member.of_all(again) == [again, again]
        assert again > 0


@in_processes(2)
def test_a_step_of_a_model_that_one_worker_cannot_bring_back_is_refused_on_all(member: Member) -> None:
    """And the next one is taken by all. Which models are away differs from worker to worker."""
    base = member.base("text")
    backend = LocalBackend(base, TrainingConfig(logits_chunk=64), member.group)
    size = backend.memory.lora_bytes(LoraShape(4, 0)).training
    backend.memory.pager = StatePager(base.device, size, host_room=2**30)
    for seed, name in enumerate("ab"):
        backend.create_model(name, LoraShape(4, seed))
    model, other = (backend.optimizers[name] for name in "ab")
    assert isinstance(model, ModelOptimizer)
    backend.memory.pager.bring([model])
    before = state(model)
    for attempt in range(2):
        backend.memory.pager.bring([model])
        accumulate(model, member.rank, 0)
        backend.memory.pager.bring([model if member.rank == 0 else other])
        assert backend.memory.pager.is_on_device(model) == (member.rank == 0)
        if attempt == 0:
            with pytest.MonkeyPatch.context() as patch:
                if member.rank == 1:
                    patch.setattr(StatePager, "_page_in", _out_of_memory)
                with pytest.raises(TinsmithError, match=f"^worker 1 of 2: {STAYS} as they were: it needs "):
                    backend.optim_step("a", SETTINGS)
            assert model.accumulator.totals is None
            backend.memory.pager.bring([model])
            assert same(before, state(model))
        else:
            assert backend.optim_step("a", SETTINGS)["grad_norm"] > 0
    masters = member.of_all(model.weights.buffers()[0])
    assert torch.equal(masters[0], masters[1])


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@in_processes(2)
def test_a_step_that_only_some_took_ends_all(member: Member) -> None:
    """Whatever kind of error it is: one that does not answer would let the others wait."""
    text = f"^worker {member.rank} of 2 took another step than the others, or none where they took one: "
    for kind, spoil in itertools.product(("lora", "compact"), APART):
        optimizer = begun(member, kind)
        with pytest.MonkeyPatch.context() as patch:
            spoil(member, optimizer, patch)
            with pytest.raises(DeviceLostError, match=text):
                all_reduce_step(optimizer, SETTINGS, member.group)


@in_processes(2)
def test_a_step_of_a_model_that_is_not_on_all_ends_all_and_lets_none_wait(member: Member) -> None:
    backend = LocalBackend(member.base("text"), TrainingConfig(logits_chunk=64), member.group)
    with pytest.raises(NotFoundError, match=r"^model m is not loaded; create it anew$"):
        backend.optim_step("m", SETTINGS)
    if member.rank == 0:
        backend.create_model("m", LoraShape(4, 0))
    with pytest.raises(
        DeviceLostError, match=r"^the workers are not the same any more: whether model m is there is \[1, 0\], by rank$"
    ):
        backend.optim_step("m", SETTINGS)


@pytest.mark.skipif(ON_GPUS, reason="it is about the memory of a host whose CPUs the workers share")
@in_processes(2)
def test_each_trains_as_long_a_sequence_as_the_plan_says(member: Member) -> None:
    """Each with its part of the host's memory, as the one counts that found least of it."""
    if ON_GPUS:
        return
    base = member.base("text", max_context=1024)
    weights = sum(parameter.nbytes for parameter in base.network.parameters())
    config = replace(
        LIMITED, base_models=[f"tiny={member.directory / 'bases' / 'text'}"], distributed=DistributedConfig(workers=2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith.worker.device_memory.free_memory", lambda device: FREE_BYTES + member.rank * 2**20)
        patch.setattr(
            "tinsmith.memory.plan.look_around",
            partial(Machine, 2, 2**40, FREE_BYTES + 2 * weights, [], "there is none"),
        )
        memory, planned = DeviceMemory({"tiny": base}, LIMITED, member.group), make_plan(config, 32, None)
        own = memory.longest_trained("tiny"), memory.longest_together("tiny")
    longest = planned.longest_sequence
    assert 0 < longest.tokens < 1024
    assert longest.tokens < longest.together
    assert (
        (planned.modes[0].longest_sequence, planned.modes[0].longest_together)
        == own
        == (longest.tokens, longest.together)
    )
    assert planned.cache is not None
    assert memory.plans["tiny"].budget.cache == planned.cache.bytes


@in_processes(2)
def test_who_finds_the_others_gone_says_so(member: Member) -> None:
    """All but the first end without a word, so this comes last."""
    if member.rank:
        os._exit(0)
    optimizer = fresh("lora", torch.float32)
    accumulate(optimizer, 0, 0)
    with pytest.raises(WorkersLostError, match=r"^worker 0 of 2 cannot reach the others: "):
        all_reduce_step(optimizer, SETTINGS, member.group)
