"""One optimizer step of one model: torch's own AdamW over the float32 masters, with hyper-parameters given anew at every step."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tinsmith.errors import UserError
from tinsmith.models.full import Weights, training_bytes


@dataclass(frozen=True)
class AdamSettings:
    """Hyper-parameters of one AdamW step (Loshchilov and Hutter, 2019), as torch.optim.AdamW names them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Decoupled: weights shrink by lr · weight_decay."""
    grad_clip_norm: float
    """Largest global L2 norm of the gradient; 0 or less switches clipping off."""


class ModelOptimizer:
    """What one model trains, with gradient accumulators and AdamW's moments, all float32."""

    def __init__(self, weights: Weights, moments: Mapping[str, Tensor] | None = None) -> None:
        """Start anew, or from what the optimizer of a saved model remembered (`moments`)."""
        self.weights = weights
        self.gradients: list[Tensor] | None = None
        self.adamw = torch.optim.AdamW(weights.tensors(), lr=0.0, fused=True)
        tensors = weights.named_tensors()
        for key, value in (moments or {}).items():
            name, _, entry = key.rpartition(".")
            self.adamw.state[tensors[name]][entry] = value

    def moments(self) -> dict[str, Tensor]:
        """What AdamW remembers, as TENSOR.exp_avg, TENSOR.exp_avg_sq and TENSOR.step; empty before the first step.

        These are the optimizer's own tensors: the next step changes them.
        """
        tensors = self.weights.named_tensors()
        return {f"{name}.{entry}": value for name, tensor in tensors.items() for entry, value in self.adamw.state[tensor].items()}

    @property
    def unclaimed(self) -> int:
        """Bytes that the model will take when it is trained, beyond what it holds now."""
        held = (*(self.gradients or []), *self.moments().values())
        return training_bytes(self.weights.parameter_count, self.weights.dtype) - self.weights.nbytes - sum(t.nbytes for t in held)

    def accumulate(self, gradients: list[Tensor | None]) -> None:
        """Add the gradients of one successful pass, in the order of `Weights.tensors`; None where the pass did not reach a tensor.

        They belong to the optimizer from then on, and may be changed in place.
        """
        if self.gradients is None:
            pairs = zip(self.weights.tensors(), gradients, strict=True)
            self.gradients = [torch.zeros_like(tensor) if gradient is None else gradient.float() for tensor, gradient in pairs]
            return
        reached = [(total, gradient) for total, gradient in zip(self.gradients, gradients, strict=True) if gradient is not None]
        torch._foreach_add_([total for total, _ in reached], [gradient for _, gradient in reached])

    def clear(self) -> None:
        """Forget what has been accumulated."""
        self.gradients = None

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Update the masters and clear the accumulators; returns metrics (`grad_norm` is taken before clipping).

        Without gradients nothing moves, as in torch. Raises UserError when the gradient is not finite; the weights stay as they were.
        """
        gradients, self.gradients = self.gradients, None
        if gradients is None:
            return {"grad_norm": 0.0, "learning_rate": settings.lr}
        norm = get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise UserError(
                f"the gradient norm is {norm.item()}: the step was refused, the gradients are cleared and the weights stay as they were; "
                "look for infinite weights, -inf log-probabilities or a learning rate that is too high"
            )
        if settings.grad_clip_norm > 0:
            for tensor, gradient in zip(self.weights.tensors(), gradients, strict=True):
                tensor.grad = gradient
            clip_grads_with_norm_(self.weights.tensors(), settings.grad_clip_norm, norm)
        self._update(gradients, settings)
        return {"grad_norm": norm.item(), "learning_rate": settings.lr}

    def _update(self, gradients: list[Tensor], settings: AdamSettings) -> None:
        tensors = self.weights.tensors()
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        self.adamw.param_groups[0].update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        first = not self.moments()
        try:
            self.adamw.step()
        except RuntimeError:
            if first:  # out of memory: there are moments of some tensors now, and not of others
                self.adamw.state.clear()
            raise
        finally:
            for tensor in tensors:
                tensor.grad = None
        self.weights.refresh()
