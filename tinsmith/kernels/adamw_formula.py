"""AdamW's step as its formula and in PyTorch, operation by operation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith.protocol.shapes import AdamSettings


@dataclass(frozen=True)
class Factors:
    """Factors of one step of AdamW, the same for all tensors of a model.

        g = scale · gradient
        m = beta1 · m + (1 - beta1) · g
        v = beta2 · v + (1 - beta2) · g · g
        w = decay · w - rate · m / (sqrt(v) / root + eps)

    This is torch's AdamW (Loshchilov and Hutter, 2019) with `decay` = 1 - lr · weight_decay, `rate` = lr / (1 -
    beta1^t) and `root` = sqrt(1 - beta2^t), t being the number of the step, from 1.
    """

    scale: float
    """Factor of the gradient for clipping; 1 for none."""
    beta1: float
    beta2: float
    decay: float
    rate: float
    root: float
    eps: float

    @classmethod
    def of(cls, settings: AdamSettings, number: int, scale: float) -> "Factors":
        beta1, beta2 = settings.betas
        decay, rate = 1 - settings.lr * settings.weight_decay, settings.lr / (1 - beta1**number)
        return cls(scale, beta1, beta2, decay, rate, math.sqrt(1 - beta2**number), settings.eps)


@torch.no_grad()
def step_as_written(master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, factors: Factors) -> None:
    """Update a master and both of its moments (float32) in place. `gradient` may be of any precision."""
    g = gradient.float() * factors.scale
    first.mul_(factors.beta1).add_(g, alpha=1 - factors.beta1)
    second.mul_(factors.beta2).addcmul_(g, g, value=1 - factors.beta2)
    del g  # before more memory is taken
    master.mul_(factors.decay)
    master.addcdiv_(first, (second.sqrt() / factors.root).add_(factors.eps), value=-factors.rate)
