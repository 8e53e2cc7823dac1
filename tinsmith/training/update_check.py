"""AdamW's numbers: the factors of a step, and the check, before it is taken, that it leaves every number finite.

Bounds on the sizes of weights and moments are carried from step to step as three numbers: they prove nearly every step
finite without a look at a tensor. A step that they do not prove is computed ahead, piece by piece, on copies.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from tinsmith.errors import UserError
from tinsmith.protocol.shapes import AdamSettings

SAFE = 1e37
"""Largest magnitude with room for rounding: the largest number of float32 and bfloat16 is 3.4e38."""

SMALLEST_EPS = float(torch.finfo(torch.float32).tiny)
"""A smaller eps counts as 0: float32 may round it to 0."""

PIECE_SIZE = 2**22
"""Numbers of a tensor that are computed ahead at a time."""

ENTRIES = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's moments of a tensor, of its shape."""
MOMENTS = ("step", *ENTRIES)
"""Names of all that AdamW remembers of a tensor."""


def clip_scale(grad_norm: float, settings: AdamSettings) -> float:
    """Return the factor with which torch clips gradients of this norm."""
    limit = settings.grad_clip_norm
    return min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0


@dataclass(frozen=True)
class Bounds:
    """No weight, first moment or second moment of a model is larger than this, in absolute value."""

    weight: float
    first: float
    second: float

    @classmethod
    def measured(cls, weights: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> "Bounds":
        """Find the largest absolute values of the weights and of both moments."""
        return cls(
            *(
                get_total_norm(list(tensors), math.inf).item() if tensors else 0.0
                for tensors in (weights, first, second)
            )
        )

    def after(self, grad_norm: float, settings: AdamSettings) -> "Bounds | None":
        """Bounds after a step with this gradient norm; None if they do not prove all numbers finite, in between too.

        A moment is a weighted mean of what it was and the gradient (or its square), so it exceeds neither. The step is
        lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps) with t at least 1, and its denominator is at least eps.
        """
        beta1, beta2 = settings.betas
        first, second = max(self.first, grad_norm), max(self.second, grad_norm**2)
        rate, shrunk = settings.lr / (1 - beta1), settings.lr * settings.weight_decay
        ratio = first / settings.eps if settings.eps >= SMALLEST_EPS else math.inf
        weight = (self.weight * (1 + shrunk) + rate * ratio) * (1 + 1e-6)  # float32 rounds each operation by 6e-8
        between = (weight, first, second / (1 - beta2), rate, shrunk, ratio, rate * first)
        if not all(size < SAFE for size in between):  # NaN is no proof either
            return None
        return Bounds(weight, first, second * (1 + 1e-6))


def configure(adamw: torch.optim.AdamW, settings: AdamSettings) -> None:
    """Let the next step use these settings."""
    adamw.param_groups[0].update(
        lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


def require_finite_step(
    weights: Mapping[str, Tensor],
    gradients: Sequence[Tensor],
    moments: Mapping[str, Tensor],
    settings: AdamSettings,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> None:
    """Compute AdamW's step on copies of a few pieces.

    Raises UserError naming a tensor that would not stay finite, also in `dtype`.

    `moments` are named as by `ModelOptimizer.moments`; `scale` is what clipping still multiplies the gradients with.
    """
    for (name, tensor), gradient in zip(weights.items(), gradients, strict=True):
        state = {entry: moments[f"{name}.{entry}"] for entry in MOMENTS} if moments else {}
        for found in _computed_ahead(tensor, gradient, state, settings, scale):
            wrong = [what for what, values in found.items() if not torch.isfinite(values).all()]
            wrong = wrong or ([f"weights in {dtype}"] if not torch.isfinite(found["weights"].to(dtype)).all() else [])
            if wrong:
                raise UserError(_refusal(name, wrong, tensor, settings))


def _computed_ahead(
    tensor: Tensor, gradient: Tensor, state: Mapping[str, Tensor], settings: AdamSettings, scale: float
) -> Iterator[dict[str, Tensor]]:
    """Yield weights and moments after the step, some rows at a time; `state` is what AdamW remembers of the tensor."""
    rows = max(1, PIECE_SIZE * len(tensor) // max(1, tensor.numel()))
    moments = {name: values.split(rows) for name, values in state.items() if name != "step"}
    for index, (part, part_gradient) in enumerate(zip(tensor.split(rows), gradient.split(rows), strict=True)):
        copy = part.detach().clone()
        copy.grad = part_gradient.detach().float() * scale
        ahead = torch.optim.AdamW([copy], lr=0.0, fused=True)
        configure(ahead, settings)
        if state:
            step = state["step"].to(copy.device, copy=True)  # AdamW's fused kernel counts steps where its tensors are
            ahead.state[copy] = {"step": step} | {name: parts[index].clone() for name, parts in moments.items()}
        ahead.step()
        yield {
            "weights": copy,
            "first moments": ahead.state[copy]["exp_avg"],
            "second moments": ahead.state[copy]["exp_avg_sq"],
        }


def _refusal(name: str, wrong: Sequence[str], tensor: Tensor, settings: AdamSettings) -> str:
    if not torch.isfinite(tensor).all():
        remedy = "they were not before either: load a checkpoint of before that"
    elif settings.eps < SMALLEST_EPS:
        remedy = "send an eps above 0, as 1e-12: Adam divides by it where a gradient is 0"
    else:
        remedy = "lower learning_rate or weight_decay, or raise eps"
    sent = f"learning_rate={settings.lr:g}, eps={settings.eps:g}, weight_decay={settings.weight_decay:g}"
    return (
        f"the update is not finite: {' and '.join(wrong)} of {name} would be infinite or NaN with {sent}; "
        f"the step was refused, the gradients are cleared, and weights and optimizer stay as they were; {remedy}"
    )
