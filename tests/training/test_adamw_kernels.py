"""AdamW's step in one kernel, against torch's, and optimizers that take their steps so.

On a CPU the kernel runs in Triton's interpreter, which knows no bfloat16; on CUDA it runs as it is.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tests.training.test_optimizer import SETTINGS
from tinsmith.errors import DeviceLostError, UserError
from tinsmith.models.full import FullState, FullWeights, new_compact_weights, new_full_weights
from tinsmith.models.lora import Adapter, LoraPair
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training import optimizer as module
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.optimizer import ModelOptimizer

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
SHAPES = {"embed.weight": (37, 24), "mlp.weight": (130, 33), "norm.weight": (24,)}
"""One has more numbers than a program computes."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tinsmith.training.adamw_kernels")


@pytest.fixture
def in_kernels(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers take their steps in kernels, on a CPU too."""
    monkeypatch.setattr(module, "_steps_in_kernels", lambda weights: True)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def fresh(dtype: torch.dtype) -> FullWeights:
    return FullWeights(LoraShape(0, 0), {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}, dtype)


def gradients(seed: int, dtype: torch.dtype) -> list[Tensor]:
    return [drawn(*shape, seed=100 * seed + i + 7).to(dtype) for i, shape in enumerate(SHAPES.values())]


class Reference:
    """torch's AdamW over copies of the masters, in float64."""

    def __init__(self, weights: FullWeights) -> None:
        self.copies = [master.double().requires_grad_() for master in weights.tensors()]
        self.adamw = torch.optim.AdamW(self.copies)

    def step(self, found: list[Tensor], settings: AdamSettings) -> None:
        for copy, gradient in zip(self.copies, found, strict=True):
            copy.grad = gradient.double()
        if settings.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.copies, settings.grad_clip_norm)
        self.adamw.param_groups[0].update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        self.adamw.step()


def assert_like(weights: FullWeights, reference: Reference) -> None:
    """Within a few roundings of float32; the working copies are the masters, rounded."""
    for master, leaf, copy in zip(weights.tensors(), weights.leaves(), reference.copies, strict=True):
        torch.testing.assert_close(master.double(), copy.detach(), rtol=2e-6, atol=2e-7)
        assert torch.equal(master.to(leaf.dtype), leaf.detach())


@pytest.mark.parametrize("way", ["step", "step_as_written"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_step_is_that_of_torch(kernels: Any, way: str, dtype: torch.dtype) -> None:
    weights = fresh(HALF)
    reference = Reference(weights)
    moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in weights.tensors()]
    for number, settings in enumerate(SETTINGS[:2] * 2, 1):
        found = gradients(number, dtype)
        factors = kernels.Factors.of(settings, number, 1.0)
        for master, leaf, gradient, (first, second) in zip(weights.tensors(), weights.leaves(), found, moments, strict=True):
            getattr(kernels, way)(master, gradient, first, second, leaf, factors)
        reference.step(found, settings)
        assert_like(weights, reference)


def test_tensors_with_other_strides_step_too(kernels: Any) -> None:
    """A base model may have them; the gradient lies in another order."""
    turned, straight = drawn(40, 60, seed=1).t(), drawn(40, 60, seed=1).t().contiguous()
    gradient, factors = drawn(60, 40, seed=2), kernels.Factors.of(SETTINGS[1], 1, 0.5)
    for master in (turned, straight):
        leaf = master.to(HALF)
        kernels.step(master, gradient, torch.zeros_like(master), torch.zeros_like(master), leaf, factors)
        assert torch.equal(leaf, master.to(HALF))
    torch.testing.assert_close(turned, straight, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("state", ["float32", "compact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_a_base_that_lie_otherwise_are_trained_as_gradients_lie(dtype: torch.dtype, state: FullState) -> None:
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
    optimizer.contribution([torch.ones_like(leaf) for leaf in optimizer.weights.leaves()])()
    optimizer.step(SETTINGS[0])
    for name, tensor in optimizer.weights.named_tensors().items():
        torch.testing.assert_close(tensor.float(), before[name] - SETTINGS[0].lr, rtol=2**-7 * (dtype == torch.bfloat16) + 1e-6, atol=1e-3)


@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_steps_of_a_model_are_those_of_torch(passes: int) -> None:
    """Gradients of several passes are added up in float32; those of one stay as they came. Clipping is torch's."""
    optimizer = ModelOptimizer(weights := fresh(HALF))
    reference = Reference(weights)
    for number, settings in enumerate(SETTINGS):
        found = [gradients(10 * number + each, HALF) for each in range(passes)]
        for of_pass in found:
            optimizer.contribution([gradient.clone() for gradient in of_pass])()
        assert {total.dtype for total in optimizer.totals or []} == {HALF if passes == 1 else torch.float32}
        sums = [sum((part.float() for part in parts), torch.zeros((), device=DEVICE)) for parts in zip(*found, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(optimizer.gradients or [], sums, strict=True))
        metrics = optimizer.step(settings)
        assert metrics["grad_norm"] == pytest.approx(plain_norm(sums), rel=1e-6)
        assert optimizer.totals is None
        reference.step(sums, settings)
        assert_like(weights, reference)


@pytest.mark.usefixtures("in_kernels")
def test_gradients_of_which_some_are_float32_already_count_as_they_are() -> None:
    """Memory may end while those of a pass are widened: the pass fails, and the step goes on with what was there before."""
    optimizer, plain = ModelOptimizer(fresh(HALF)), ModelOptimizer(fresh(HALF))
    for each in (optimizer, plain):
        each.contribution(gradients(0, HALF))()
    assert optimizer.totals is not None
    optimizer.totals[0] = optimizer.totals[0].float()
    for each in (optimizer, plain):
        assert each.step(SETTINGS[2])["grad_norm"] == pytest.approx(plain_norm(gradients(0, HALF)), rel=1e-6)
    for one, other in zip(optimizer.weights.tensors(), plain.weights.tensors(), strict=True):
        assert torch.equal(one, other)


def plain_norm(found: list[Tensor]) -> float:
    return float(torch.cat([each.double().flatten() for each in found]).norm())


@pytest.mark.usefixtures("in_kernels")
def test_a_model_goes_on_from_what_was_remembered() -> None:
    """The number of the step comes from the moments, also after a change between ways."""
    straight = ModelOptimizer(fresh(HALF))
    for number in range(3):
        straight.contribution(gradients(number, HALF))()
        straight.step(SETTINGS[1])
    masters = {name: master.clone() for name, master in straight.weights.named_tensors().items()}
    resumed = ModelOptimizer(
        FullWeights(LoraShape(0, 0), masters, HALF), {name: value.clone() for name, value in straight.moments().items()}
    )
    assert {float(value) for name, value in resumed.moments().items() if name.endswith(".step")} == {3.0}
    for optimizer in (straight, resumed):
        optimizer.contribution(gradients(3, HALF))()
        optimizer.step(SETTINGS[1])
    for one, other in zip(straight.weights.tensors(), resumed.weights.tensors(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("in_kernels")
def test_a_step_that_is_not_finite_changes_nothing() -> None:
    optimizer = ModelOptimizer(weights := fresh(HALF))
    optimizer.contribution(gradients(0, HALF))()
    optimizer.step(SETTINGS[1])
    before = [tensor.clone() for tensor in (*weights.tensors(), *optimizer.moments().values())]
    for bad, settings in ((float("nan"), SETTINGS[1]), (1.0, AdamSettings(1e38, (0.9, 0.95), 1e-30, 0.0, 0.0))):
        spoiled = gradients(1, HALF)
        spoiled[1][3, 4] = bad
        optimizer.contribution(spoiled)()
        with pytest.raises(UserError, match=r"gradient norm is nan|update is not finite"):
            optimizer.step(settings)
        assert optimizer.totals is None
        assert all(torch.equal(a, b) for a, b in zip(before, (*weights.tensors(), *optimizer.moments().values()), strict=True))
    optimizer.contribution(gradients(2, HALF))()
    optimizer.step(SETTINGS[1])
    assert {float(value) for name, value in optimizer.moments().items() if name.endswith(".step")} == {2.0}


@pytest.mark.usefixtures("in_kernels")
def test_a_step_that_fails_halfway_ends_the_worker(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are of no step. To say that they stayed as they were would be wrong, and another step would move some of them twice."""
    optimizer = ModelOptimizer(fresh(HALF))
    optimizer.contribution(gradients(0, HALF))()
    step, calls = kernels.step, []

    def failing(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no")
        step(*arguments)

    monkeypatch.setattr(kernels, "step", failing)
    with pytest.raises(DeviceLostError, match="changed some of the weights"):
        optimizer.step(SETTINGS[1])


@pytest.mark.usefixtures("in_kernels")
def test_what_is_computed_ahead_is_clipped_too() -> None:
    """With an eps of 0 no bound proves a step finite. Its gradients are not changed by the look ahead."""
    settings = AdamSettings(1e-3, (0.9, 0.95), 0.0, 0.0, 0.5)
    optimizer = ModelOptimizer(weights := fresh(HALF))
    reference = Reference(weights)
    for number in range(2):
        found = gradients(number, HALF)
        optimizer.contribution([gradient.clone() for gradient in found])()
        optimizer.step(settings)
        reference.step(found, settings)
    assert_like(weights, reference)


@pytest.mark.skipif(DEVICE != "cuda", reason="on a CPU torch takes all steps")
def test_kernels_step_full_weights_in_half_precision_alone() -> None:
    pair = LoraPair(drawn(2, 5, seed=0), drawn(4, 2, seed=1))
    assert ModelOptimizer(fresh(torch.bfloat16)).kernels is not None
    assert ModelOptimizer(fresh(torch.float32)).kernels is None
    assert ModelOptimizer(Adapter(LoraShape(2, 0), {"up": pair}, torch.bfloat16, device=torch.device(DEVICE))).kernels is None
