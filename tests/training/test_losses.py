"""Losses against a few lines of plain torch, and the words for what is not there."""

import pytest
import torch

from tinsmith.errors import NotBuiltError, UserError
from tinsmith.training.losses import LOSSES, NOT_BUILT, cross_entropy, find_loss


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_cross_entropy_is_the_weighted_sum_with_weights_of_any_sign(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logprobs = -torch.rand(shape).requires_grad_()
    weights = torch.randn(shape)
    loss = cross_entropy(logprobs, {"weights": weights})
    torch.testing.assert_close(loss, -(weights * logprobs).sum())
    (grad,) = torch.autograd.grad(loss, [logprobs])
    assert torch.equal(grad, -weights)


def test_a_position_of_weight_zero_contributes_exactly_zero() -> None:
    logprobs = torch.tensor([-1.0, float("-inf")], requires_grad=True)
    loss = cross_entropy(logprobs, {"weights": torch.tensor([2.0, 0.0])})
    assert loss.item() == 2.0
    (grad,) = torch.autograd.grad(loss, [logprobs])
    assert grad.tolist() == [-2.0, 0.0]


def test_losses_that_are_not_built_say_so() -> None:
    for name in NOT_BUILT:
        with pytest.raises(NotBuiltError, match=f"loss_fn '{name}' is not built yet"):
            find_loss(name, {})


def test_unknown_losses_and_config_keys_are_refused() -> None:
    assert find_loss("cross_entropy", {}) is LOSSES["cross_entropy"]
    with pytest.raises(UserError, match="loss_fn 'crossentropy' is unknown; this version computes cross_entropy"):
        find_loss("crossentropy", {})
    with pytest.raises(UserError, match="loss_fn_config key 'beta' is not one of cross_entropy's"):
        find_loss("cross_entropy", {"beta": 0.1})
