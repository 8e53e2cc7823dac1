"""The optimizer step is torch's AdamW, number for number, whether torch takes it or a kernel of ours.

On a CPU the kernel runs in Triton's interpreter, which knows no bfloat16; on CUDA it runs as it is.

Invariant: The optimizer is torch's AdamW, number for number; on a GPU full weights in half precision step in kernels of
our own, which agree with it within roundings; an update that is not finite, also in the base's precision, changes
nothing. Also: `tests/acceptance/test_refused_steps.py`.
"""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE, new_ref
from tinsmith.errors import DeviceLostError, UserError
from tinsmith.kernels.adamw_formula import Factors
from tinsmith.models.full import FullState, FullWeights, Weights, new_compact_weights, new_full_weights
from tinsmith.models.lora import LoraPair, adapter_of
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training import optimizer as module
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.optimizer import ModelOptimizer

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
IN_KERNELS = "full in kernels"
WAYS = {
    "lora": torch.float32,
    "lora in half": torch.bfloat16,
    "full": torch.float32,
    "full in half": torch.bfloat16,
    IN_KERNELS: HALF,
}
"""What is trained and by whom, with the precision of passes."""

SHAPES = {"embed.weight": (37, 24), "mlp.weight": (130, 33), "norm.weight": (24,)}
"""One has more numbers than a program of the kernel computes."""


def settings(
    lr: float = 1e-2, eps: float = 1e-12, weight_decay: float = 0.0, grad_clip_norm: float = 0.0
) -> AdamSettings:
    return AdamSettings(lr, (0.9, 0.95), eps, weight_decay, grad_clip_norm)


SETTINGS = [
    settings(),
    AdamSettings(lr=5e-3, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0),
    settings(1e-3, 1e-8, grad_clip_norm=0.5),
    settings(2e-3, 1e-8, grad_clip_norm=100.0),
    settings(eps=0.0),
    settings(eps=0.0, grad_clip_norm=0.5),
]
"""The last two are steps that no bound proves to be finite, so that they are computed ahead."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def weights_for(way: str) -> Weights:
    """Full weights, or LoRA, where one B is 0."""
    if way.startswith("full"):
        masters = {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}
        return FullWeights(LoraShape(0, 0), masters, WAYS[way])
    pairs = {
        "up": LoraPair(drawn(2, 5, seed=0), drawn(4, 2, seed=1) * 0),
        "down": LoraPair(drawn(2, 5, seed=2), drawn(4, 2, seed=3)),
    }
    return adapter_of(LoraShape(2, 0), pairs, WAYS[way], device=torch.device(DEVICE))


def gradients(weights: Weights, seed: int) -> list[Tensor]:
    """As a pass finds them."""
    return [drawn(*leaf.shape, seed=100 * seed + i).to(leaf.dtype) for i, leaf in enumerate(weights.leaves())]


def accumulate(optimizer: ModelOptimizer, found: list[Tensor]) -> None:
    """One pass, which leaves what it is given as it is."""
    optimizer.accumulator.contribution([gradient.clone() for gradient in found])()


def resumed(optimizer: ModelOptimizer, weights: Weights) -> ModelOptimizer:
    """Another one with the numbers of both, as from a checkpoint."""
    for tensor, trained in zip(weights.tensors(), optimizer.weights.tensors(), strict=True):
        tensor.copy_(trained)
    weights.refresh()
    return ModelOptimizer(weights, {name: value.clone() for name, value in optimizer.moments().items()})


def everything(optimizer: ModelOptimizer) -> list[Tensor]:
    """Copies of all that a step changes."""
    weights = optimizer.weights
    return [
        tensor.detach().clone() for tensor in (*weights.tensors(), *weights.leaves(), *optimizer.moments().values())
    ]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.fixture(params=WAYS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModelOptimizer]:
    """A new optimizer of each way, whatever the device."""
    if request.param == IN_KERNELS:
        pytest.importorskip("triton")
    monkeypatch.setattr(module, "_steps_in_kernels", lambda weights: request.param == IN_KERNELS)
    return lambda: ModelOptimizer(weights_for(request.param))


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tinsmith.kernels.adamw")


only_in_kernels = pytest.mark.parametrize("make", [IN_KERNELS], indirect=True)


class Reference:
    """torch's AdamW over copies of the masters, in float64, each a tensor for itself."""

    def __init__(self, weights: Weights) -> None:
        self.copies = {name: master.double().requires_grad_() for name, master in weights.named_tensors().items()}
        self.adamw = torch.optim.AdamW(self.copies.values())

    def step(self, found: list[Tensor], settings: AdamSettings) -> float:
        """Returns the norm of the gradient."""
        for copy, gradient in zip(self.copies.values(), found, strict=True):
            copy.grad = gradient.double()
        norm = torch.nn.utils.clip_grad_norm_(self.copies.values(), settings.grad_clip_norm or torch.inf)
        self.adamw.param_groups[0].update(
            lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
        )
        self.adamw.step()
        return norm.item()

    def assert_like(self, weights: Weights) -> None:
        """Within a few roundings of float32; the working copies are the masters, rounded."""
        for master, leaf, copy in zip(weights.tensors(), weights.leaves(), self.copies.values(), strict=True):
            torch.testing.assert_close(master.double(), copy.detach(), rtol=2e-6, atol=2e-7)
            assert torch.equal(master.to(leaf.dtype), leaf.detach())


@pytest.mark.parametrize("passes", [1, 3])
def test_steps_with_changing_settings_equal_torch(make: Callable[[], ModelOptimizer], passes: int) -> None:
    """Gradients of passes are added up in float32, also where a pass does not reach all; one pass's stay as they came
    where a kernel steps.

    A pass counts when it is added, and in one step only. Halfway another optimizer goes on from what was remembered.
    """
    optimizer = make()
    reference = Reference(optimizer.weights)
    for number, chosen in enumerate(SETTINGS):
        if number == 2:
            optimizer = resumed(optimizer, make().weights)
        sums = [torch.zeros_like(tensor) for tensor in optimizer.weights.tensors()]
        for each in range(passes):
            found: list[Tensor | None] = [*gradients(optimizer.weights, 10 * number + each)]
            if passes > 1 and each != 1:
                found[each // 2] = None
            before = [total.clone() for total in optimizer.accumulator.gradients or []]
            add = optimizer.accumulator.contribution(
                [None if gradient is None else gradient.clone() for gradient in found]
            )
            assert_equal(optimizer.accumulator.gradients or [], before)
            add()
            sums = [
                total if gradient is None else total + gradient.float()
                for total, gradient in zip(sums, found, strict=True)
            ]
            assert_equal(optimizer.accumulator.gradients or [], sums)
        kept_in = HALF if optimizer.kernels and passes == 1 else torch.float32
        assert {total.dtype for total in optimizer.accumulator.totals or []} == {kept_in}
        assert optimizer.step(chosen)["grad_norm"] == pytest.approx(reference.step(sums, chosen), rel=1e-6)
        reference.assert_like(optimizer.weights)
        if (bounds := optimizer.bounds) is not None:  # they prove that the next step is finite
            moments = optimizer.moments().items()
            first, second = (
                [value for name, value in moments if name.endswith(kind)] for kind in ("exp_avg", "exp_avg_sq")
            )
            for values, bound in (
                (optimizer.weights.tensors(), bounds.weight),
                (first, bounds.first),
                (second, bounds.second),
            ):
                assert max(value.abs().max().item() for value in values) <= bound * (1 + 1e-5)
    stepped = everything(optimizer)
    assert optimizer.step(SETTINGS[0])["grad_norm"] == 0.0
    assert_equal(everything(optimizer), stepped)


def test_gradients_that_share_their_memory_count_once_each() -> None:
    """Autograd may give the same tensor for two weights, or parts of one."""
    masters = {name: torch.zeros(3, 4, device=DEVICE) for name in ("one", "two", "three")}
    optimizer = ModelOptimizer(FullWeights(LoraShape(0, 0), masters, torch.float32))
    shared, joint = torch.ones(3, 4, device=DEVICE), torch.ones(6, 4, device=DEVICE)
    optimizer.accumulator.contribution([shared, shared, joint[3:]])()
    optimizer.accumulator.contribution([torch.ones(3, 4, device=DEVICE) for _ in masters])()
    assert all(total.eq(2).all() for total in optimizer.accumulator.gradients or [])
    assert joint.eq(1).all()


@only_in_kernels
def test_gradients_of_which_some_are_float32_already_count_as_they_are(make: Callable[[], ModelOptimizer]) -> None:
    """Memory may end while those of a pass are widened: the pass fails, and the step goes on with what was there
    before."""
    optimizer, plain = make(), make()
    for each in (optimizer, plain):
        accumulate(each, gradients(each.weights, 0))
    assert optimizer.accumulator.totals is not None
    optimizer.accumulator.totals[0] = optimizer.accumulator.totals[0].float()
    norms = [each.step(SETTINGS[2])["grad_norm"] for each in (optimizer, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert_equal(optimizer.weights.tensors(), plain.weights.tensors())


def test_the_norm_of_many_numbers_is_exact() -> None:
    """On a CPU, float32 loses four digits if it adds up as many squares one after the other."""
    wide = {"up": LoraPair(torch.zeros(8, 500_000), torch.zeros(4, 8))}
    optimizer = ModelOptimizer(adapter_of(LoraShape(8, 0), wide, torch.float32, device=torch.device(DEVICE)))
    found = [gradient.abs() for gradient in gradients(optimizer.weights, 0)]
    accumulate(optimizer, found)
    expected = torch.cat([gradient.double().flatten() for gradient in found]).norm().item()
    assert optimizer.step(SETTINGS[0])["grad_norm"] == pytest.approx(expected, rel=1e-6)


NAN, INF = float("nan"), float("inf")
NORM, UPDATE = (
    "gradient norm is {}: the step was refused",
    "the update is not finite: .*weights.* of .* would be infinite or NaN with .*{}",
)


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize(
    ("bad", "changed", "message"),
    [
        (NAN, {}, NORM.format("nan")),
        (INF, {}, NORM.format("inf")),
        (1, {"eps": 0.0}, UPDATE.format("learning_rate=0.01, eps=0, weight_decay=0; .*; send an eps above 0")),
        (1, {"eps": 1e-46}, UPDATE.format("send an eps above 0")),
        (1, {"lr": 1e38}, UPDATE.format("learning_rate=1e\\+38, eps=1e-12, weight_decay=0; .*; lower learning_rate")),
        (1, {"weight_decay": 1e41}, UPDATE.format("weight_decay=1e\\+41; .*; lower learning_rate or weight_decay")),
        (1, {"lr": 1e30, "weight_decay": 1e30}, UPDATE.format("lower learning_rate or weight_decay")),
    ],
)
def test_a_step_that_is_not_finite_is_refused_and_changes_nothing(
    make: Callable[[], ModelOptimizer], steps_before: int, bad: float, changed: dict[str, float], message: str
) -> None:
    optimizer = make()
    zero_somewhere = [gradient * (gradient > 0) for gradient in gradients(optimizer.weights, 0)]
    for _ in range(steps_before):
        accumulate(optimizer, zero_somewhere)
        optimizer.step(settings())
    before = everything(optimizer)
    broken = [gradient.clone() for gradient in zero_somewhere]
    broken[2].view(-1)[3] = bad
    accumulate(optimizer, broken)
    with pytest.raises(UserError, match=message):
        optimizer.step(settings(**changed))
    assert_equal(everything(optimizer), before)
    assert optimizer.accumulator.gradients is None
    assert all(tensor.grad is None for tensor in optimizer.weights.tensors())
    accumulate(optimizer, zero_somewhere)
    optimizer.step(settings())
    assert {float(value) for name, value in optimizer.moments().items() if name.endswith(".step")} == {steps_before + 1}


def test_weights_that_only_overflow_in_the_working_precision_are_refused() -> None:
    optimizer = ModelOptimizer(weights_for("full in half"))
    optimizer.weights.tensors()[2].fill_(3.4e38)  # float32 holds it, bfloat16 rounds it to infinity
    accumulate(optimizer, [torch.zeros_like(tensor) for tensor in optimizer.weights.tensors()])
    with pytest.raises(UserError, match=r"weights in torch.bfloat16 of norm.weight would be infinite"):
        optimizer.step(settings())


def test_a_snapshot_does_not_follow() -> None:
    optimizer = ModelOptimizer(weights_for("lora"))
    snapshot, late = (optimizer.weights.snapshot(new_ref()) for _ in range(2))
    # Of the other they are first asked for when training has gone on
    before = [tensor.clone() for tensor in snapshot.leaves()]
    accumulate(optimizer, gradients(optimizer.weights, 0))
    optimizer.step(SETTINGS[0])
    for each in (snapshot, late):
        assert_equal([*each.leaves(), *each.tensors()], before * 2)
    assert not torch.equal(optimizer.weights.leaves()[0], before[0])


def test_tensors_with_other_strides_step_too(kernels: Any) -> None:
    """A base model may have them; the gradient lies in another order."""
    turned, straight = drawn(40, 60, seed=1).t(), drawn(40, 60, seed=1).t().contiguous()
    gradient, factors = drawn(60, 40, seed=2), Factors.of(SETTINGS[1], 1, 0.5)
    for master in (turned, straight):
        leaf = master.to(HALF)
        kernels.step(master, gradient, torch.zeros_like(master), torch.zeros_like(master), leaf, factors)
        assert torch.equal(leaf, master.to(HALF))
    torch.testing.assert_close(turned, straight, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("state", ["float32", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_base_that_lie_otherwise_are_trained_as_gradients_lie(
    dtype: torch.dtype, state: FullState
) -> None:
    """On a GPU torch's AdamW refuses gradients that are laid out otherwise."""
    parameters = {"turned": drawn(24, 16, seed=0).t(), "straight": drawn(9, 5, seed=1)}
    shape, device = LoraShape(0, 0), torch.device(DEVICE)
    optimizer: Optimizer
    if state == "compact":
        optimizer = CompactOptimizer(new_compact_weights(shape, parameters, dtype, device, state), state)
    else:
        optimizer = ModelOptimizer(new_full_weights(shape, parameters, dtype))
    before = {name: tensor.clone() for name, tensor in optimizer.weights.named_tensors().items()}
    assert all(torch.equal(before[name], parameter) for name, parameter in parameters.items())
    assert all(leaf.is_contiguous() for leaf in optimizer.weights.leaves())
    optimizer.accumulator.contribution([torch.ones_like(leaf) for leaf in optimizer.weights.leaves()])()
    optimizer.step(SETTINGS[0])
    for name, tensor in optimizer.weights.named_tensors().items():
        torch.testing.assert_close(
            tensor.float(), before[name] - SETTINGS[0].lr, rtol=2**-7 * (dtype == torch.bfloat16) + 1e-6, atol=1e-3
        )


@only_in_kernels
def test_a_step_that_fails_halfway_ends_the_worker(
    kernels: Any, make: Callable[[], ModelOptimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are of no step.

    To say that they stayed as they were would be wrong, and another step would move some of them twice.
    """
    optimizer = make()
    accumulate(optimizer, gradients(optimizer.weights, 0))
    step, calls = kernels.step, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no")
        step(*arguments)

    monkeypatch.setattr(kernels, "step", failing)
    with pytest.raises(DeviceLostError, match="changed some of the weights"):
        optimizer.step(SETTINGS[1])


@pytest.mark.skipif(DEVICE != "cuda", reason="on a CPU torch takes all steps")
def test_kernels_step_full_weights_in_half_precision_alone() -> None:
    in_kernels = [way for way in WAYS if ModelOptimizer(weights_for(way)).kernels is not None]
    assert in_kernels == ["full in half", IN_KERNELS]
