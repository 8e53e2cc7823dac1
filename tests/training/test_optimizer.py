"""The optimizer step is torch's AdamW, number for number."""

import pytest
import torch

from tinsmith.errors import UserError
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter, LoraPair, LoraShape
from tinsmith.training.optimizer import AdamSettings, ModelOptimizer


def small_adapter() -> Adapter:
    generator = torch.Generator().manual_seed(3)
    pairs = {name: LoraPair(torch.randn(2, 5, generator=generator), torch.randn(4, 2, generator=generator)) for name in ("up", "down")}
    return Adapter(LoraShape(2, 0), pairs, torch.float32)


def gradients(weights: Weights, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator) for tensor in weights.tensors()]


SETTINGS = [
    AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0),
    AdamSettings(lr=5e-3, betas=(0.8, 0.99), eps=1e-8, weight_decay=0.1, grad_clip_norm=0.0),
    AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip_norm=0.5),
    AdamSettings(lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip_norm=100.0),
]


def test_steps_with_changing_settings_equal_torch() -> None:
    optimizer = ModelOptimizer(small_adapter())
    copies = [tensor.clone().requires_grad_() for tensor in optimizer.weights.tensors()]
    reference = torch.optim.AdamW(copies)
    for seed, settings in enumerate(SETTINGS):
        first, second = gradients(optimizer.weights, seed), gradients(optimizer.weights, seed + 100)
        optimizer.accumulate([gradient.clone() for gradient in first])
        optimizer.accumulate([gradient.clone() for gradient in second])
        metrics = optimizer.step(settings)
        for copy, a, b in zip(copies, first, second, strict=True):
            copy.grad = a + b
        if settings.grad_clip_norm > 0:
            norm = torch.nn.utils.clip_grad_norm_(copies, settings.grad_clip_norm)
        else:
            norm = torch.nn.utils.get_total_norm([copy.grad for copy in copies if copy.grad is not None])
        reference.param_groups[0].update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        reference.step()
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-6)
        for tensor, copy in zip(optimizer.weights.tensors(), copies, strict=True):
            torch.testing.assert_close(tensor, copy.detach(), atol=1e-7, rtol=1e-6)
        for tensor, leaf in zip(optimizer.weights.tensors(), optimizer.weights.leaves(), strict=True):
            assert torch.equal(tensor, leaf)


def test_a_step_consumes_its_gradients() -> None:
    optimizer = ModelOptimizer(small_adapter())
    optimizer.accumulate(list(gradients(optimizer.weights, 0)))
    optimizer.step(SETTINGS[0])
    before = [tensor.clone() for tensor in optimizer.weights.tensors()]
    assert optimizer.step(SETTINGS[0])["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.weights.tensors(), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    optimizer = ModelOptimizer(small_adapter())
    optimizer.accumulate(list(gradients(optimizer.weights, 0)))
    optimizer.step(SETTINGS[0])
    before = [tensor.clone() for tensor in optimizer.weights.tensors()]
    broken = gradients(optimizer.weights, 1)
    broken[2][0, 0] = bad
    optimizer.accumulate(list(broken))
    with pytest.raises(UserError, match=r"gradient norm is (nan|inf): the step was refused"):
        optimizer.step(SETTINGS[0])
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.weights.tensors(), strict=True))
    assert optimizer.gradients is None


def test_a_snapshot_does_not_follow() -> None:
    optimizer = ModelOptimizer(small_adapter())
    snapshot = optimizer.weights.snapshot()
    before = [tensor.clone() for tensor in snapshot.leaves()]
    optimizer.accumulate(list(gradients(optimizer.weights, 0)))
    optimizer.step(SETTINGS[0])
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot.leaves(), strict=True))
    assert not torch.equal(optimizer.weights.leaves()[0], before[0])
