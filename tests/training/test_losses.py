"""Losses against a few lines of plain torch: values, gradients, the edges of float32, and what is refused.

Invariant: Every loss has the value and gradient of its formula, however a call is split; a position that does not count
contributes exactly 0. Also: `tests/acceptance/test_losses.py`.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.extent import amount
from tests.plain_losses import DEFAULTS, FORMULAS
from tinsmith.errors import NotBuiltError, UserError
from tinsmith.training.losses import LOSSES, METRICS, NOT_BUILT, DatumSpans, LossGroup, cross_entropy, find_loss

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


def alone(logprobs: Tensor) -> DatumSpans:
    """All positions belong to one datum."""
    return DatumSpans([len(logprobs)], logprobs.device)


def value_and_gradient(name: str, logprobs: Tensor, inputs: Inputs, **config: float) -> tuple[Tensor, Tensor]:
    leaf = logprobs.clone().requires_grad_()
    loss = find_loss(name, config).compute(leaf, inputs, alone(logprobs)).sum()
    (gradient,) = torch.autograd.grad(loss, [leaf])
    return loss.detach(), gradient


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_cross_entropy_is_the_weighted_sum_with_weights_of_any_sign(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logprobs = -torch.rand(shape).requires_grad_()
    weights = torch.randn(shape)
    loss = cross_entropy(logprobs, {"weights": weights}, {}, alone(logprobs)).sum()
    torch.testing.assert_close(loss, -(weights * logprobs).sum())
    (grad,) = torch.autograd.grad(loss, [logprobs])
    assert torch.equal(grad, -weights)


@pytest.mark.parametrize(
    ("name", "config", "given"),
    [
        *((name, {}, ()) for name in FORMULAS),
        *((name, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}, ()) for name in CLIPPING),
        *((name, {"clip_high_threshold": 1.5}, ()) for name in CLIPPING),
        ("dro", {"beta": 0.0}, ()),
        ("dro", {"beta": 0.7}, ()),
        *(("dro", {}, given) for given in (("mask",), ("weights",), ("mask", "weights"))),
        ("stable_reinforce", {"kl_coeff": 0.3}, ()),
    ],
)
@pytest.mark.parametrize("drift", [0.0, 0.05, 1.5])
@pytest.mark.parametrize(
    ("dtype", "bounds"), [(torch.float32, (2e-6, 2e-5, 1e-5, 1e-6)), (torch.float64, (1e-12,) * 4)]
)
def test_a_policy_loss_equals_plain_torch(
    name: str,
    config: dict[str, float],
    given: tuple[str, ...],
    drift: float,
    dtype: torch.dtype,
    bounds: tuple[float, ...],
) -> None:
    """In dro, a mask or weights decide which positions count, whatever the advantages and sampled logprobs."""
    for seed in range(amount(2, 8)):
        logprobs, inputs = policy_inputs(seed, 40, drift)
        generator = torch.Generator().manual_seed(100 + seed)
        inputs |= {key: (torch.rand(40, generator=generator) < 0.5).float() for key in given}
        logprobs, inputs = logprobs.to(dtype), {key: values.to(dtype) for key, values in inputs.items()}
        loss, gradient = value_and_gradient(name, logprobs, inputs, **config)
        leaf = logprobs.clone().requires_grad_()
        expected = FORMULAS[name](leaf, inputs, DEFAULTS[name] | config)
        torch.testing.assert_close(loss, expected.detach(), rtol=bounds[0], atol=bounds[1])
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, [leaf])[0], rtol=bounds[2], atol=bounds[3])


def test_dro_without_a_penalty_leaves_an_impossible_token_that_has_no_advantage_alone() -> None:
    inputs = {"logprobs": torch.tensor([-3.0, -1.0]), "advantages": torch.tensor([0.0, 2.0])}
    loss, gradient = value_and_gradient("dro", torch.tensor([-INF, -1.5]), inputs, beta=0.0)
    assert (float(loss), gradient.tolist()) == (3.0, [0.0, -2.0])


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
    loss, gradient = value_and_gradient(
        name, logprobs, inputs | {"clip_low_threshold": low, "clip_high_threshold": high}
    )
    torch.testing.assert_close(loss, parts[0][0] + parts[1][0])
    torch.testing.assert_close(gradient, parts[0][1] + parts[1][1])


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("outside", [-INF, -80.0])
def test_a_position_without_weight_or_advantage_contributes_exactly_zero(name: str, outside: float) -> None:
    """Neither -inf nor a ratio e^80 gets through; q there is a prompt's padding or (but for dro) a sampled token's."""
    logprobs, inputs = policy_inputs(2, 6, 0.3)
    if name == "cross_entropy":
        inputs["weights"] = inputs["advantages"]
    short = value_and_gradient(name, logprobs, inputs)
    padding = dict.fromkeys(inputs, torch.zeros(2)) | {
        "logprobs": torch.tensor([0.0, 0.0 if name == "dro" else -200.0])
    }
    padded = {key: torch.cat([padding[key], values]) for key, values in inputs.items()}
    loss, gradient = value_and_gradient(name, torch.cat([torch.tensor([outside, outside]), logprobs]), padded)
    assert gradient[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(loss, short[0])
    torch.testing.assert_close(gradient[2:], short[1])


def test_trainer_and_sampler_are_compared_where_tokens_count() -> None:
    """By datum, exactly: also an impossible token, and one that a client calls so unlikely that no number holds it."""
    sampled = np.array([-1.0, -9.0, -2.5, 0.0, -1.0, -0.5, -1000.0], np.float32)[:, None]
    advantages = np.array([1.0, 0.0, -2.0, 0.0, 0.5, 1.0, 1.0], np.float32)[:, None]
    now = np.array([-1.5, -1.0, -2.0, np.nan, -np.inf, -0.5, -1.0], np.float32)[:, None]
    group = LossGroup(LOSSES["ppo"], [0, 1, 2, 3], [3, 1, 1, 2], {"logprobs": sampled, "advantages": advantages})
    count, k1, k3 = group.compared(now).tolist()
    assert count == [2, 0, 1, 2]
    assert k1 == [0.0, 0.0, INF, -999.0]
    assert k3 == [pytest.approx(math.expm1(-0.5) + 0.5 + math.expm1(0.5) - 0.5, rel=1e-15), 0.0, INF, INF]
    mask = np.array([0, 1, 1, 0, 0, 1, 0], np.float32)[:, None]
    masked = LossGroup(LOSSES["gspo"], group.places, group.lengths, group.inputs | {"sequence_ratio_mask": mask})
    assert masked.compared(now)[:2].tolist() == [[2, 0, 0, 1], [-8.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("sick", [False, True])
def test_datums_of_one_row_have_the_losses_that_they_have_alone(name: str, sick: bool) -> None:
    """Also beside one that is full of NaN."""
    lengths, generator = (9, 4, 30, 17), torch.Generator().manual_seed(0)
    each = [policy_inputs(seed, length, 1.0) for seed, length in enumerate(lengths)]
    for logprobs, inputs in each:
        inputs["weights"] = (
            torch.rand(len(logprobs), generator=generator) if name == "cross_entropy" else inputs["sequence_ratio_mask"]
        )
    if sick:
        each[1][0].fill_(float("nan"))
    loss = find_loss(name, {"kl_coeff": 0.3} if name == "stable_reinforce" else {})
    row = torch.cat([logprobs for logprobs, _ in each]).requires_grad_()
    inputs = {key: torch.cat([own[key] for _, own in each]) for key in each[0][1]}
    spans = DatumSpans(lengths, row.device)
    of_positions, metrics = loss.compute(row, inputs, spans), loss.diagnose(row.detach(), inputs, spans)
    (gradient,) = torch.autograd.grad(of_positions, [row], torch.ones_like(of_positions))
    together = zip(of_positions.detach().split(lengths), gradient.split(lengths), metrics.T, each, strict=True)
    for place, (mine, slope, numbers, (logprobs, own)) in enumerate(together):
        if sick and place == 1:
            assert mine.isnan().any()
            continue
        value, expected = value_and_gradient(name, logprobs, own, **loss.config)
        torch.testing.assert_close(mine.sum(), value)
        assert torch.equal(slope, expected)
        assert torch.equal(numbers, loss.diagnose(logprobs, own, alone(logprobs)).flatten())


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_inputs_say_where_a_gradient_may_be(name: str) -> None:
    """All others are exactly 0, whatever the log-probabilities are: the LM head computes no gradient there."""
    for seed, drift in itertools.product(range(8), (0.05, 1.5)):
        logprobs, inputs = policy_inputs(seed, 40, drift)
        if name == "cross_entropy":
            inputs["weights"] = inputs["advantages"]
        _, gradient = value_and_gradient(name, logprobs, inputs)
        trained = find_loss(name, {}).trains(inputs)
        assert trained.dtype == torch.bool
        assert 0 < trained.sum() < 40
        assert not gradient[~trained].any()
        if name in ("cross_entropy", "importance_sampling"):
            assert gradient[trained].all()


@pytest.mark.parametrize(
    ("name", "gap", "advantage", "value", "slope"),
    [
        *((name, -INF, 1.0, 0.0, 0.0) for name in ("importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce")),
        *((name, -INF, -1.0, 0.0, 0.0) for name in ("importance_sampling", "cispo", "stable_reinforce")),
        *((name, -INF, -1.0, 0.8, 0.0) for name in ("ppo", "gspo")),
        *((name, 199.0, 1.0, -1.2, 0.0) for name in ("ppo", "gspo")),
        ("cispo", 199.0, 1.0, 4.0, -4.0),
        ("stable_reinforce", 199.0, 1.0, 0.0, 0.0),
        ("stable_reinforce", 199.0, -1.0, 0.4, 0.4),
    ],
)
def test_a_ratio_of_zero_or_beyond_float32_is_clipped_like_any_other(
    name: str, gap: float, advantage: float, value: float, slope: float
) -> None:
    """A target that became impossible counts as ratio zero; with A < 0, ppo and gspo then stop at the lower bound."""
    one = torch.tensor([1.0])
    inputs = {"logprobs": (-1 - max(gap, 0.0)) * one, "advantages": advantage * one, "sequence_ratio_mask": one}
    loss, gradient = value_and_gradient(name, torch.tensor([-INF if gap == -INF else -1.0]), inputs)
    assert float(loss) == pytest.approx(value)
    assert gradient.tolist() == pytest.approx([slope])


def test_stable_reinforce_reports_its_weights_and_drift() -> None:
    """Of two sampled tokens with ratios of 1/2 and e, of which the second is held at 2, behind one of the prompt.

    The log-ratios are -0.6931 and 1: the drift is sqrt((0.4805 + 1) / 2) = 0.86036, trust 0.2 / 0.86036 = 0.23246.
    """
    logprobs = torch.tensor([-4.0, -1.0 - math.log(2.0), -1.0])
    sampled, mask = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([0.0, 1.0, 1.0])
    inputs = {"logprobs": sampled, "advantages": torch.tensor([0.0, 3.0, -1.0]), "sequence_ratio_mask": mask}
    found = dict(
        zip(
            METRICS,
            LOSSES["stable_reinforce"].diagnose(logprobs, inputs, alone(logprobs)).flatten().tolist(),
            strict=True,
        )
    )
    expected = {"weight": 0.23246 * 2.5 / 2, "limited": 0.5, "drift": 0.86036}
    assert found == pytest.approx(
        {f"tinsmith_stable_reinforce/{name}": value for name, value in expected.items()}, abs=1e-5
    )


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "crossentropy",
            {},
            "loss_fn 'crossentropy' is unknown; this version computes cross_entropy, importance_sampling, ppo",
        ),
        (
            "ppo",
            {"clip_low": 0.1},
            "loss_fn_config key 'clip_low' is not one of ppo's: clip_low_threshold, clip_high_threshold",
        ),
        ("dro", {"beta": "0.1"}, r"loss_fn_config\['beta'\] is '0.1'; it must be a finite number, at least 0"),
        ("cispo", {"clip_high_threshold": float("nan")}, r"loss_fn_config\['clip_high_threshold'\] is nan; it must be"),
        ("gspo", {"clip_high_threshold": INF}, r"loss_fn_config\['clip_high_threshold'\] is inf; it must be"),
        (
            "stable_reinforce",
            {"kl_coeff": -0.1},
            r"loss_fn_config\['kl_coeff'\] is -0.1; it must be a finite number, at least 0",
        ),
        (
            "ppo",
            {"clip_low_threshold": 1.3},
            "clip_low_threshold=1.3, clip_high_threshold=1.2; the low one must not be above",
        ),
        *((name, {}, f"loss_fn '{name}' is not built: .*forward_backward_custom") for name in NOT_BUILT),
    ],
)
def test_unknown_names_and_wrong_settings_are_refused(name: str, config: dict[str, float | str], message: str) -> None:
    with pytest.raises(NotBuiltError if name in NOT_BUILT else UserError, match=message):
        find_loss(name, config)
