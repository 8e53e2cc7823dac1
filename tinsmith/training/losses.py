"""Losses: pure functions of the target log-probabilities and the datum's inputs, summed over positions. One each, by name in `LOSSES`.

Reductions are sums, never means, so that however a batch is split its gradients stay the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.errors import NotBuiltError, UserError

LossFunction = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(logprobs [N] or [N, K], inputs by name with the same shape) -> scalar loss."""


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """-Σ weights · logprobs, with weights of any sign; for K targets a position, summed over them too.

    A position of weight 0 contributes exactly 0, also where its log-probability is -inf.
    Source: the public documentation of the Tinker API, "cross_entropy".
    """
    weights = inputs["weights"]
    return -torch.where(weights == 0, torch.zeros_like(logprobs), weights * logprobs).sum()


@dataclass(frozen=True)
class Loss:
    """A loss that clients can name."""

    function: LossFunction
    inputs: tuple[str, ...]
    """loss_fn_inputs it reads besides target_tokens, each of the shape of target_tokens."""
    config: tuple[str, ...] = ()
    """loss_fn_config keys it knows."""


LOSSES = {"cross_entropy": Loss(cross_entropy, ("weights",))}

NOT_BUILT = ("importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom")
"""Losses of the Tinker API that this version does not compute."""


def find_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """The loss of that name. Raises NotBuiltError or UserError for a name or a config key that it does not know."""
    if name in NOT_BUILT:
        raise NotBuiltError(f"loss_fn {name!r} is not built yet; this version computes {', '.join(LOSSES)}")
    if name not in LOSSES:
        raise UserError(f"loss_fn {name!r} is unknown; this version computes {', '.join(LOSSES)}")
    loss = LOSSES[name]
    for key in config:
        if key not in loss.config:
            raise UserError(f"loss_fn_config key {key!r} is not one of {name}'s: {', '.join(loss.config) or 'it takes none'}")
    return loss
