"""The optimizer step is torch's AdamW, number for number."""

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.bases import DEVICE, new_ref
from tinsmith.errors import UserError
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter, LoraPair
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.update_check import Bounds


def small_adapter() -> Adapter:
    generator = torch.Generator().manual_seed(3)
    pairs = {name: LoraPair(torch.randn(2, 5, generator=generator), torch.randn(4, 2, generator=generator)) for name in ("up", "down")}
    return Adapter(LoraShape(2, 0), pairs, torch.float32, device=torch.device(DEVICE))


def gradients(weights: Weights, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator).to(DEVICE) for tensor in weights.tensors()]


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
        optimizer.contribution([gradient.clone() for gradient in first])()
        optimizer.contribution([gradient.clone() for gradient in second])()
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


def test_an_adapter_steps_as_torch_does_with_all_its_numbers_in_one_tensor() -> None:
    """Bit for bit: what differs from one tensor for each matrix is only which numbers a processor computes side by side."""
    optimizer = ModelOptimizer(small_adapter())
    (buffer,) = optimizer.weights.buffers()
    copy = buffer.clone().requires_grad_()
    reference = torch.optim.AdamW([copy], fused=True)
    for seed, settings in enumerate(SETTINGS[:2]):
        flat = torch.empty_like(buffer)
        for view, gradient in zip(optimizer.weights.cut([flat]), gradients(optimizer.weights, seed), strict=True):
            view.copy_(gradient)
        optimizer.contribution(gradients(optimizer.weights, seed))()
        optimizer.step(settings)
        copy.grad = flat
        reference.param_groups[0].update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        reference.step()
        assert torch.equal(buffer, copy.detach())


def test_what_torch_remembers_of_each_tensor_is_gone_on_from() -> None:
    """Checkpoints of earlier versions were written by an AdamW that had each matrix for itself."""
    adapter = small_adapter()
    copies = {name: tensor.clone().requires_grad_() for name, tensor in adapter.named_tensors().items()}
    reference = torch.optim.AdamW(list(copies.values()), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    for seed in range(3):
        for copy, gradient in zip(copies.values(), gradients(adapter, seed), strict=True):
            copy.grad = gradient
        reference.step()
    pairs = {name: LoraPair(copies[f"{name}.a"].detach(), copies[f"{name}.b"].detach()) for name in adapter.masters}
    moments = {f"{name}.{entry}": value for name, copy in copies.items() for entry, value in reference.state[copy].items()}
    optimizer = ModelOptimizer(Adapter(adapter.shape, pairs, torch.float32, device=torch.device(DEVICE)), moments)
    assert list(optimizer.moments()) == list(moments)
    assert all(torch.equal(value.cpu(), moments[name].cpu()) for name, value in optimizer.moments().items())
    optimizer.contribution(gradients(adapter, 3))()
    optimizer.step(settings())
    for copy, gradient in zip(copies.values(), gradients(adapter, 3), strict=True):
        copy.grad = gradient
    reference.step()
    for tensor, copy in zip(optimizer.weights.tensors(), copies.values(), strict=True):
        torch.testing.assert_close(tensor, copy.detach(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_passes_add_up_where_a_pass_does_not_reach_all(kind: str, dtype: torch.dtype) -> None:
    optimizer = ModelOptimizer(fresh_weights(kind, dtype))
    passes: list[list[torch.Tensor | None]] = [[g.to(dtype) for g in gradients(optimizer.weights, seed)] for seed in range(3)]
    passes[0][0] = passes[2][1] = None
    expected = [torch.zeros_like(tensor) for tensor in optimizer.weights.tensors()]
    for found in passes:
        for total, gradient in zip(expected, found, strict=True):
            if gradient is not None:
                total += gradient.float()
        before = None if optimizer.gradients is None else [total.clone() for total in optimizer.gradients]
        add = optimizer.contribution([None if gradient is None else gradient.clone() for gradient in found])
        if before is None:
            assert optimizer.gradients is None
        else:
            assert all(torch.equal(a, b) for a, b in zip(before, optimizer.gradients or [], strict=True))
        add()
        assert all(torch.equal(a, b) for a, b in zip(expected, optimizer.gradients or [], strict=True))


def test_gradients_that_share_their_memory_count_once_each() -> None:
    """Autograd may give the same tensor for two weights, or parts of one."""
    masters = {name: torch.zeros(3, 4, device=DEVICE) for name in ("one", "two", "three")}
    optimizer = ModelOptimizer(FullWeights(LoraShape(0, 0), masters, torch.float32))
    shared, joint = torch.ones(3, 4, device=DEVICE), torch.ones(6, 4, device=DEVICE)
    optimizer.contribution([shared, shared, joint[3:]])()
    optimizer.contribution([torch.ones(3, 4, device=DEVICE) for _ in masters])()
    assert all(total.eq(2).all() for total in optimizer.gradients or [])
    assert joint.eq(1).all()


def test_the_norm_of_many_numbers_is_exact() -> None:
    """On a CPU, float32 loses four digits if it adds up as many squares one after the other."""
    generator = torch.Generator().manual_seed(0)
    wide = {"up": LoraPair(torch.zeros(8, 500_000), torch.zeros(4, 8))}
    optimizer = ModelOptimizer(Adapter(LoraShape(8, 0), wide, torch.float32, device=torch.device(DEVICE)))
    found = [torch.rand(tensor.shape, generator=generator).to(DEVICE) for tensor in optimizer.weights.tensors()]
    optimizer.contribution([gradient.clone() for gradient in found])()
    expected = torch.cat([gradient.double().flatten() for gradient in found]).norm().item()
    assert optimizer.step(SETTINGS[0])["grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_a_step_consumes_its_gradients() -> None:
    optimizer = ModelOptimizer(small_adapter())
    optimizer.contribution(list(gradients(optimizer.weights, 0)))()
    optimizer.step(SETTINGS[0])
    before = [tensor.clone() for tensor in optimizer.weights.tensors()]
    assert optimizer.step(SETTINGS[0])["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.weights.tensors(), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(bad: float) -> None:
    optimizer = ModelOptimizer(small_adapter())
    optimizer.contribution(list(gradients(optimizer.weights, 0)))()
    optimizer.step(SETTINGS[0])
    before = [tensor.clone() for tensor in optimizer.weights.tensors()]
    broken = gradients(optimizer.weights, 1)
    broken[2][0, 0] = bad
    optimizer.contribution(list(broken))()
    with pytest.raises(UserError, match=r"gradient norm is (nan|inf): the step was refused"):
        optimizer.step(SETTINGS[0])
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.weights.tensors(), strict=True))
    assert optimizer.gradients is None


def test_a_snapshot_does_not_follow() -> None:
    optimizer = ModelOptimizer(small_adapter())
    snapshot, late = (optimizer.weights.snapshot(new_ref()) for _ in range(2))
    before = [tensor.clone() for tensor in snapshot.leaves()]  # of the other they are first asked for when training has gone on
    optimizer.contribution(list(gradients(optimizer.weights, 0)))()
    optimizer.step(SETTINGS[0])
    for each in (snapshot, late):
        assert all(torch.equal(a, b) for a, b in zip(before, each.leaves(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, each.tensors(), strict=True))
    assert not torch.equal(optimizer.weights.leaves()[0], before[0])


def settings(lr: float = 1e-2, eps: float = 1e-12, weight_decay: float = 0.0) -> AdamSettings:
    return AdamSettings(lr, (0.9, 0.95), eps, weight_decay, grad_clip_norm=0.0)


def fresh_weights(kind: str, dtype: torch.dtype) -> Weights:
    """LoRA with B = 0, or full weights."""
    generator = torch.Generator().manual_seed(3)
    device = torch.device(DEVICE)
    a, other = torch.randn(2, 5, generator=generator), torch.randn(4, 2, generator=generator)
    if kind == "lora":
        return Adapter(LoraShape(2, 0), {"up": LoraPair(a, torch.zeros(4, 2)), "down": LoraPair(a.clone(), other)}, dtype, device=device)
    return FullWeights(LoraShape(0, 0), {"embed.weight": a.to(device), "norm.weight": torch.ones(7, device=device)}, dtype)


def everything(optimizer: ModelOptimizer) -> list[torch.Tensor]:
    """Copies of all that a step changes."""
    weights = optimizer.weights
    return [tensor.detach().clone() for tensor in (*weights.tensors(), *weights.leaves(), *optimizer.moments().values())]


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ({"eps": 0.0}, "learning_rate=0.01, eps=0, weight_decay=0; .*; send an eps above 0"),
        ({"eps": 1e-46}, "send an eps above 0"),
        ({"lr": 1e38}, "learning_rate=1e\\+38, eps=1e-12, weight_decay=0; .*; lower learning_rate"),
        ({"weight_decay": 1e41}, "weight_decay=1e\\+41; .*; lower learning_rate or weight_decay"),
        ({"lr": 1e30, "weight_decay": 1e30}, "lower learning_rate or weight_decay"),
    ],
)
def test_an_update_that_is_not_finite_is_refused_and_changes_nothing(
    steps_before: int, kind: str, dtype: torch.dtype, changed: dict[str, float], remedy: str
) -> None:
    optimizer = ModelOptimizer(fresh_weights(kind, dtype))
    zero_somewhere = [gradient * (gradient > 0) for gradient in gradients(optimizer.weights, 0)]
    for _ in range(steps_before):
        optimizer.contribution([gradient.clone() for gradient in zero_somewhere])()
        optimizer.step(settings())
    before = everything(optimizer)
    optimizer.contribution([gradient.clone() for gradient in zero_somewhere])()
    with pytest.raises(UserError, match=f"the update is not finite: .*weights.* of .* would be infinite or NaN with .*{remedy}"):
        optimizer.step(settings(**changed))
    after = everything(optimizer)
    assert len(after) == len(before)
    assert all(torch.equal(new, old) for new, old in zip(after, before, strict=True))
    assert optimizer.gradients is None
    assert all(tensor.grad is None for tensor in optimizer.weights.tensors())


def test_weights_that_only_overflow_in_the_working_precision_are_refused() -> None:
    optimizer = ModelOptimizer(fresh_weights("full", torch.bfloat16))
    optimizer.weights.tensors()[1].fill_(3.4e38)  # float32 holds it, bfloat16 rounds it to infinity
    optimizer.contribution([torch.zeros_like(tensor) for tensor in optimizer.weights.tensors()])()
    with pytest.raises(UserError, match=r"weights in torch.bfloat16 of norm.weight would be infinite"):
        optimizer.step(settings())


def test_a_step_that_the_bounds_do_not_prove_is_computed_as_torch_does_if_it_is_finite() -> None:
    optimizers = [ModelOptimizer(small_adapter()) for _ in range(2)]
    optimizers[1].bounds = Bounds(1.0, 0.0, 0.0)
    for seed in range(3):
        for optimizer in optimizers:
            optimizer.contribution(gradients(optimizer.weights, seed))()
            optimizer.step(settings(eps=0.0))  # no gradient is 0, so nothing is divided by 0
    copies = [tensor.clone().requires_grad_() for tensor in small_adapter().tensors()]
    reference = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0)
    for seed in range(3):
        for copy, gradient in zip(copies, gradients(small_adapter(), seed), strict=True):
            copy.grad = gradient
        reference.step()
    for tensor, copy in zip(optimizers[0].weights.tensors(), copies, strict=True):
        torch.testing.assert_close(tensor, copy.detach(), atol=1e-7, rtol=1e-6)


@given(
    lr=st.floats(0, 1e-1),
    beta1=st.floats(0, 0.999),
    beta2=st.floats(0, 0.999),
    eps=st.floats(1e-20, 1.0),
    weight_decay=st.floats(0, 10.0),
    scale=st.floats(1e-12, 1e12),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_weights_and_moments_stay_within_their_bounds(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, scale: float
) -> None:
    optimizer = ModelOptimizer(small_adapter())
    for seed in range(4):
        optimizer.contribution([gradient * scale * 10.0 ** (seed - 2) for gradient in gradients(optimizer.weights, seed)])()
        optimizer.step(AdamSettings(lr, (beta1, beta2), eps, weight_decay, 0.0))
        if (bounds := optimizer.bounds) is None:
            continue
        state = optimizer.moments()
        for found, bound in (
            (optimizer.weights.tensors(), bounds.weight),
            ([value for name, value in state.items() if name.endswith("exp_avg")], bounds.first),
            ([value for name, value in state.items() if name.endswith("exp_avg_sq")], bounds.second),
        ):
            assert max(tensor.abs().max().item() for tensor in found) <= bound * (1 + 1e-5)
