"""Full-parameter training in little memory: close to the float32 state, and resumed, refused and measured like it.

Its moments have 8 bits, and chance decides how they are rounded.

Invariant: A compact state of full-parameter training follows the float32 state, and each reads the other's checkpoints.
"""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE, datum, load, random_tokens, renderer
from tests.counted_memory import CountedMemory
from tests.extent import amount
from tests.training.test_backend import compute
from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, UserError
from tinsmith.kernels.adamw_formula import Factors
from tinsmith.memory.budget import full_bytes
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullState, join, split
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import read_state, write_state
from tinsmith.training.compact import BLOCK, FIRST, PIECE, SECOND, STEP_BUFFERS, Code, _Sum, chances, decode, encode

SETTINGS = AdamSettings(lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
STATES: list[FullState] = ["compact", "compact-host"]


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe", "gpt_oss"])
def base(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> BaseModel:
    """A tiny model in half precision: a dense one, and one of experts, whose matrices lie in three dimensions."""
    return load(family_dir(request.param), dtype="bfloat16")


def backend_of(base: BaseModel, state: FullState, name: str = "a") -> LocalBackend:
    """A backend with one model of all parameters."""
    backend = LocalBackend(base, TrainingConfig(logits_chunk=64, full_state=state))
    backend.create_model(name, LoraShape(0, 0))
    return backend


def train(backend: LocalBackend, base: BaseModel, steps: int, first: int = 0, passes: int = 1) -> list[float]:
    """The loss of each step: two of eight sequences that come again."""
    losses = []
    for step in range(first, first + steps):
        work = [datum("a", renderer(base).render([random_tokens((2 * step + i) % 8, 24)])) for i in range(2)]
        for item in work:
            item.loss_inputs["weights"][:] = 1 / 24
        results = [
            result for part in ([work] if passes == 1 else [work[:1], work[1:]]) for result in compute(backend, part)
        ]
        backend.optim_step("a", SETTINGS)
        losses.append(sum(result.loss for result in results))
    return losses


def masters(backend: LocalBackend) -> list[Tensor]:
    """The float32 masters of the model."""
    return [tensor.clone() for tensor in backend.optimizers["a"].weights.named_tensors().values()]


def assert_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


def test_taking_masters_apart_loses_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2**16, generator=generator) * torch.exp2(
        torch.randint(-120, 120, (2**16,), generator=generator).float()
    )
    wide[:8] = torch.tensor([0.0, -0.0, 1.0, -1.0, 1.00390625, -1.00390625, 1e-40, 3e38])
    wide = wide.to(DEVICE)
    near, rest = split(wide)
    assert torch.equal(join(near, rest).view(torch.int32), wide.view(torch.int32))
    ties = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(near[~ties], wide.bfloat16()[~ties])


def test_losses_stay_close_to_those_of_a_float32_state(base: BaseModel) -> None:
    """Within 2 % of what the loss fell by in 40 steps, or in 16; benchmarks/compact_state.py shows 200."""
    exact, compact = (train(backend_of(base, each), base, amount(16, 40)) for each in ("float32", "compact"))
    assert exact[0] == compact[0]
    fell = exact[0] - min(exact)
    assert fell > 1
    assert max(abs(one - other) for one, other in zip(exact, compact, strict=True)) < 0.05 * fell
    assert abs(sum(exact[-8:]) - sum(compact[-8:])) / 8 < 0.02 * fell


def test_it_takes_the_memory_that_is_planned(base: BaseModel) -> None:
    backend = backend_of(base, "compact")
    model: Any = backend.optimizers["a"]
    count = model.weights.parameter_count
    planned = full_bytes(count, torch.bfloat16, "compact")
    assert model.weights.nbytes == planned.weights + planned.masters == 4 * count
    assert model.unclaimed == planned.device - 4 * count
    train(backend, base, 1)
    backend.run_pass([datum("a", renderer(base).render([random_tokens(0, 9)]))], backward=True)
    held = sum(tensor.nbytes for kept in model.remembered.values() for tensor in kept.tensors)
    assert planned.moments <= held < 1.02 * planned.moments  # scales of blocks that are not full
    assert sum(tensor.nbytes for tensor in model.accumulator.totals) == planned.gradients == 2 * count


@pytest.mark.parametrize(
    ("before", "after"),
    [("compact", "compact"), ("float32", "compact"), ("compact", "float32"), ("compact", "compact-host")],
)
def test_each_state_goes_on_from_the_checkpoints_of_all(
    base: BaseModel, tmp_path: Path, before: FullState, after: FullState
) -> None:
    """From its own to the same bits, also with several passes a step."""
    same, passes, steps = before == after, 2 if before == after else 1, amount(2, 4)
    backend, other = backend_of(base, before), LocalBackend(base, TrainingConfig(logits_chunk=64, full_state=after))
    train(backend, base, steps, passes=passes)
    write_state(backend.copy_state("a", optimizer=True), tmp_path / "saved")
    other.restore("a", read_state(tmp_path / "saved", base, optimizer=True))
    assert_equal(masters(backend), masters(other))
    kept, read = (each.optimizers["a"].moments() for each in (backend, other))
    assert list(kept) == list(read)
    for name in kept:
        if name.endswith(".step"):
            assert float(kept[name]) == float(read[name]) == steps
        else:
            assert (kept[name] - read[name]).norm() <= (0 if same else 0.06) * kept[name].norm()
    one, two = (train(each, base, steps, first=steps, passes=passes) for each in (backend, other))
    assert one == (two if same else pytest.approx(two, rel=0.03))
    if same:
        assert_equal(masters(backend), masters(other))


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(base: BaseModel) -> None:
    backend = backend_of(base, "compact")
    train(backend, base, 1)
    model = backend.optimizers["a"]
    before, moments = masters(backend), [tensor.clone() for tensor in model.moments().values()]
    for bad in (AdamSettings(1e39, (0.9, 0.95), 1e-8, 0.0, 0.0), AdamSettings(1e3, (0.9, 0.95), 1e-8, 1e38, 0.0)):
        backend.run_pass([datum("a", renderer(base).render([random_tokens(0, 9)]))], backward=True)
        with pytest.raises(UserError, match="the update is not finite"):
            backend.optim_step("a", bad)
        assert model.accumulator.gradients is None
    assert_equal(masters(backend), before)
    assert_equal(model.moments().values(), moments)


@pytest.mark.parametrize("state", STATES)
def test_a_step_that_began_finds_its_memory(base: BaseModel, monkeypatch: pytest.MonkeyPatch, state: FullState) -> None:
    """It is taken before anything changes: a step that ran out of memory in its middle would leave a model of old and
    new tensors."""
    backend = backend_of(base, state)
    train(backend, base, 1)
    model: Any = backend.optimizers["a"]
    monkeypatch.setitem(PIECE, torch.device(DEVICE).type, 2**14)
    gradients = [torch.ones_like(leaf).detach() for leaf in model.weights.leaves()]
    longest = max(range(len(gradients)), key=lambda number: gradients[number].numel())
    assert gradients[longest].numel() > 2**14
    kept = [tensor for moments in model.remembered.values() for tensor in moments.tensors]
    with CountedMemory([*kept, *model.weights.masters.rests.values(), *model.weights.leaves(), *gradients]) as memory:
        model._update(
            longest,
            list(model.weights.working)[longest],
            gradients[longest],
            Factors.of(SETTINGS, model.steps + 1, 1.0),
        )
    assert 4 * 2**14 * 12 < memory.peak <= 4 * 2**14 * STEP_BUFFERS


@pytest.mark.parametrize("state", STATES)
def test_a_step_that_fails_halfway_ends_the_worker(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, state: FullState
) -> None:
    """Another thread may take the memory.

    What is left of the model is of no step, and nobody may be told that nothing has changed.
    """
    backend = backend_of(base, state)
    train(backend, base, 1)
    backend.run_pass([datum("a", renderer(base).render([random_tokens(0, 9)]))], backward=True)
    calls = itertools.count(1)

    def fail_the_ninth(values: Tensor, seed: Tensor) -> Tensor:
        if next(calls) == 9:
            raise torch.OutOfMemoryError("out of memory")
        return chances(values, seed)

    monkeypatch.setattr("tinsmith.training.compact.chances", fail_the_ninth)
    with pytest.raises(DeviceLostError, match="changed some of the weights: OutOfMemoryError"):
        backend.optim_step("a", SETTINGS)


def test_workers_of_a_host_keep_their_shares_of_its_memory(family_dir: Callable[[str], Path]) -> None:
    """Each could have all that is free at the moment.

    What models will keep after their first step counts, and that of other bases.
    """
    bases = [load(family_dir(family), dtype="bfloat16") for family in ("qwen3", "llama")]
    config = TrainingConfig(logits_chunk=64, full_state="compact-host")
    first, second = backends = [LocalBackend(base, config) for base in bases]
    shape = LoraShape(0, seed=0)
    counts = [sum(parameter.numel() for parameter in base.full_targets(shape).values()) for base in bases]
    for backend in backends:
        share = sum(full_bytes(count, torch.bfloat16, "compact-host").host for count in counts)
        backend.memory.share_host(share, [each.memory for each in backends])
    first.create_model("a", shape)
    second.create_model("b", shape)
    for backend in backends:
        with pytest.raises(
            UserError,
            match=r"each may take of its host 0 are free; end other models, train with LoRA .* fewer --workers$",
        ):
            backend.create_model("c", shape)
    second.restore("b", second.copy_state("b", optimizer=True))  # in the place of what it was
    first.delete_model("a")
    first.create_model("c", shape)
    assert [list(backend.optimizers) for backend in backends] == [["c"], ["b"]]


def test_gradients_of_several_passes_add_up_in_the_mean_and_what_is_not_a_number_stays_visible() -> None:
    """bfloat16 has 8 bits: added to 1, numbers of a thousandth are lost by rounding, and not by chance.

    Rounding by chance works on bits, and some kinds of NaN would become 0 there: the step would not be refused.
    """
    total = torch.ones(2**14, dtype=torch.bfloat16, device=DEVICE)
    buffers = _Sum(2**12, torch.device(DEVICE))
    for number in range(256):
        buffers.add(total, torch.full_like(total, 2.0**-10), number)
    assert total.float().mean().item() == pytest.approx(1.25, rel=0.002)
    bits = torch.tensor(
        [0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, 0x7F800000, -0x800000], dtype=torch.int32, device=DEVICE
    )
    for dtype in (torch.float32, torch.bfloat16):
        total, gradient = torch.zeros(512, dtype=dtype, device=DEVICE), torch.zeros(512, device=DEVICE)
        gradient[: len(bits)] = bits.view(torch.float32)
        buffers.add(total, gradient.to(dtype), 3)
        assert not total[: len(bits)].isfinite().any()
        assert total[len(bits) :].eq(0).all()


@pytest.mark.parametrize("code", [FIRST, SECOND])
def test_chance_is_fair(code: Code) -> None:
    """For numbers of very different sizes, positive and negative if the code has signs, with zeros among them."""
    generator, rounds = torch.Generator().manual_seed(0), 400
    values = torch.exp2(-0.8 * code.octaves * torch.rand(1, BLOCK, generator=generator))
    values[torch.rand(values.shape, generator=generator) < 0.1] = 0
    if code.signed:
        values *= torch.randint(0, 2, values.shape, generator=generator) * 2 - 1
    values = values.to(DEVICE)
    total = torch.zeros_like(values, dtype=torch.float64)
    for seed in range(rounds):
        total += decode(*encode(values, code, chances(values, torch.tensor(seed * 7919, device=DEVICE))), code)
    assert torch.equal(total == 0, values == 0)
    ratio = (total / rounds / values)[values != 0]
    spacing = 2**code.octaves_each - 1
    assert (ratio - 1).abs().max() < 5 * spacing / 2 / rounds**0.5
    assert (ratio - 1).mean().abs() < 5 * spacing / 2 / (rounds * ratio.numel()) ** 0.5
