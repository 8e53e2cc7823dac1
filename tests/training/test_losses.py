"""Losses against a few lines of plain torch: value and gradient, ordinary numbers and the edges of float32; and what is refused."""

import pytest
import torch
from torch import Tensor

from tests.plain_losses import DEFAULTS, FORMULAS
from tinsmith.errors import NotBuiltError, UserError
from tinsmith.training.losses import LOSSES, NOT_BUILT, cross_entropy, find_loss

Inputs = dict[str, Tensor]


CLIPPING = ("ppo", "cispo", "gspo")
INF = float("inf")


def policy_inputs(seed: int, length: int, drift: float) -> tuple[Tensor, Inputs]:
    """Log-probabilities that have moved by about `drift` since they were sampled, and advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(length, generator=generator)
    sampled = logprobs + drift * torch.randn(length, generator=generator)
    mask = (torch.rand(length, generator=generator) < 0.6).float()
    mask[0] = 1
    advantages = torch.randn(length, generator=generator)
    advantages[1::7] = 0.0  # sampled tokens without advantage
    advantages[2], sampled[2] = 0.0, 0.0  # the padding of a prompt
    return logprobs, {"logprobs": sampled, "advantages": advantages, "sequence_ratio_mask": mask}


def value_and_gradient(name: str, logprobs: Tensor, inputs: Inputs, **config: float) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    loss = find_loss(name, config).compute(leaf, inputs)
    (gradient,) = torch.autograd.grad(loss, [leaf])
    return loss.detach(), gradient


def test_defaults_are_those_of_the_table() -> None:
    assert {name: dict(find_loss(name, {}).config) for name in LOSSES} == {"cross_entropy": {}} | DEFAULTS


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_cross_entropy_is_the_weighted_sum_with_weights_of_any_sign(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logprobs = -torch.rand(shape).requires_grad_()
    weights = torch.randn(shape)
    loss = cross_entropy(logprobs, {"weights": weights}, {})
    torch.testing.assert_close(loss, -(weights * logprobs).sum())
    (grad,) = torch.autograd.grad(loss, [logprobs])
    assert torch.equal(grad, -weights)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, {}) for name in FORMULAS),
        *((name, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}) for name in CLIPPING),
        *((name, {"clip_high_threshold": 1.5}) for name in CLIPPING),
        ("dro", {"beta": 0.0}),
        ("dro", {"beta": 0.7}),
    ],
)
@pytest.mark.parametrize("drift", [0.0, 0.05, 1.5])
def test_a_policy_loss_equals_plain_torch(name: str, config: dict[str, float], drift: float) -> None:
    for seed in range(8):
        logprobs, inputs = policy_inputs(seed, 40, drift)
        loss, gradient = value_and_gradient(name, logprobs, inputs, **config)
        leaf = logprobs.clone().requires_grad_()
        expected = FORMULAS[name](leaf, inputs, DEFAULTS[name] | config)
        torch.testing.assert_close(loss, expected.detach(), rtol=2e-6, atol=2e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, [leaf])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [("mask",), ("weights",), ("mask", "weights")])
def test_a_mask_or_weights_decide_which_positions_dro_counts(given: tuple[str, ...]) -> None:
    """Whatever advantages and sampled log-probabilities are there."""
    for seed in range(8):
        logprobs, inputs = policy_inputs(seed, 40, 0.5)
        generator = torch.Generator().manual_seed(100 + seed)
        inputs |= {name: (torch.rand(40, generator=generator) < 0.5).float() for name in given}
        loss, gradient = value_and_gradient("dro", logprobs.double(), {name: values.double() for name, values in inputs.items()})
        leaf = logprobs.double().requires_grad_()
        expected = FORMULAS["dro"](leaf, {name: values.double() for name, values in inputs.items()}, DEFAULTS["dro"])
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, [leaf])[0], rtol=1e-12, atol=1e-12)


def test_dro_pulls_a_sampled_token_without_advantage_back_and_leaves_padding_alone() -> None:
    """With beta 0.5: 0.25 · (lp - q)² and its slope. A mask counts a sampled token whose log-probability was exactly 0."""
    logprobs, sampled = torch.tensor([-1.0, -INF]), torch.tensor([-3.0, 0.0])
    inputs = {"logprobs": sampled, "advantages": torch.zeros(2)}
    loss, gradient = value_and_gradient("dro", logprobs, inputs, beta=0.5)
    assert (float(loss), gradient.tolist()) == (1.0, [1.0, 0.0])
    certain = {"logprobs": torch.zeros(2), "advantages": torch.zeros(2), "mask": torch.tensor([1.0, 0.0])}
    loss, gradient = value_and_gradient("dro", logprobs, certain, beta=0.5)
    assert (float(loss), gradient.tolist()) == (0.25, [-0.5, 0.0])


def test_dro_without_penalty_is_not_moved_by_an_impossible_token_without_advantage() -> None:
    inputs = {"logprobs": torch.tensor([-3.0, -1.0]), "advantages": torch.tensor([0.0, 2.0])}
    loss, gradient = value_and_gradient("dro", torch.tensor([-INF, -1.5]), inputs, beta=0.0)
    assert (float(loss), gradient.tolist()) == (3.0, [0.0, -2.0])


@pytest.mark.parametrize("name", CLIPPING)
def test_clipping_bites_in_both_directions(name: str) -> None:
    """So that the comparisons above are about clipped ratios too."""
    logprobs, inputs = policy_inputs(0, 40, 1.5)
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    losses = [value_and_gradient(name, logprobs, inputs, **wide | bound)[0] for bound in ({}, {"clip_low_threshold": 3.0})]
    losses.append(value_and_gradient(name, logprobs, inputs, **wide | {"clip_high_threshold": 0.3})[0])
    assert len({round(float(loss), 3) for loss in losses}) == 3


@pytest.mark.parametrize("name", CLIPPING)
def test_bounds_for_each_position_go_before_the_settings(name: str) -> None:
    logprobs, inputs = policy_inputs(1, 12, 0.5)
    parts = []
    for first, bounds in ((0, (0.5, 2.0)), (6, (0.95, 1.01))):
        mine = torch.zeros(12)
        mine[first : first + 6] = inputs["advantages"][first : first + 6]
        config = dict(zip(DEFAULTS[name], bounds, strict=True))
        parts.append(value_and_gradient(name, logprobs, inputs | {"advantages": mine}, **config))
    low, high = (torch.tensor([a] * 6 + [b] * 6) for a, b in ((0.5, 0.95), (2.0, 1.01)))
    loss, gradient = value_and_gradient(name, logprobs, inputs | {"clip_low_threshold": low, "clip_high_threshold": high})
    torch.testing.assert_close(loss, parts[0][0] + parts[1][0])
    torch.testing.assert_close(gradient, parts[0][1] + parts[1][1])


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("outside", [-INF, -80.0])
def test_a_position_without_weight_or_advantage_contributes_exactly_zero(name: str, outside: float) -> None:
    """Neither -inf nor a ratio of e^80 gets through; q there is the padding of a prompt, or (but for dro) that of a sampled token."""
    logprobs, inputs = policy_inputs(2, 6, 0.3)
    if name == "cross_entropy":
        inputs["weights"] = inputs["advantages"]
    short = value_and_gradient(name, logprobs, inputs)
    padding = dict.fromkeys(inputs, torch.zeros(2)) | {"logprobs": torch.tensor([0.0, 0.0 if name == "dro" else -200.0])}
    padded = {key: torch.cat([padding[key], values]) for key, values in inputs.items()}
    loss, gradient = value_and_gradient(name, torch.cat([torch.tensor([outside, outside]), logprobs]), padded)
    assert gradient[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(loss, short[0])
    torch.testing.assert_close(gradient[2:], short[1])


@pytest.mark.parametrize(("name", "value"), [("importance_sampling", 0.0), ("ppo", -0.8), ("cispo", 0.0), ("gspo", -0.8)])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_target_that_has_become_impossible_counts_as_ratio_zero(name: str, value: float, advantage: float) -> None:
    """With A < 0, ppo and gspo stop at the lower bound."""
    one = torch.tensor([1.0])
    inputs = {"logprobs": -one, "advantages": advantage * one, "sequence_ratio_mask": one}
    loss, gradient = value_and_gradient(name, torch.tensor([-INF]), inputs)
    assert float(loss) == pytest.approx(value * advantage if advantage < 0 else 0.0)
    assert gradient.tolist() == [0.0]


@pytest.mark.parametrize(("name", "value", "slope"), [("ppo", -1.2, 0.0), ("cispo", 4.0, -4.0), ("gspo", -1.2, 0.0)])
def test_a_ratio_beyond_float32_is_clipped_like_any_other(name: str, value: float, slope: float) -> None:
    one = torch.tensor([1.0])
    loss, gradient = value_and_gradient(name, -one, {"logprobs": -200 * one, "advantages": one, "sequence_ratio_mask": one})
    assert float(loss) == pytest.approx(value)
    assert gradient.tolist() == [slope]


def test_losses_that_are_not_built_say_what_to_use_instead() -> None:
    for name in NOT_BUILT:
        with pytest.raises(NotBuiltError, match=f"loss_fn '{name}' is not built: .*(use importance_sampling|forward_backward_custom)"):
            find_loss(name, {})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("crossentropy", {}, "loss_fn 'crossentropy' is unknown; this version computes cross_entropy, importance_sampling, ppo"),
        ("cross_entropy", {"beta": 0.1}, "loss_fn_config key 'beta' is not one of cross_entropy's: it takes none"),
        ("ppo", {"clip_low": 0.1}, "loss_fn_config key 'clip_low' is not one of ppo's: clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": "0.1"}, r"loss_fn_config\['beta'\] is '0.1'; it must be a finite number, at least 0"),
        ("dro", {"beta": -0.1}, r"loss_fn_config\['beta'\] is -0.1; it must be"),
        ("cispo", {"clip_high_threshold": float("nan")}, r"loss_fn_config\['clip_high_threshold'\] is nan; it must be"),
        ("gspo", {"clip_high_threshold": INF}, r"loss_fn_config\['clip_high_threshold'\] is inf; it must be"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold=1.3, clip_high_threshold=1.2; the low one must not be above"),
    ],
)
def test_unknown_names_and_wrong_settings_are_refused(name: str, config: dict[str, float | str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_loss(name, config)
