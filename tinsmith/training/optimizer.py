"""One optimizer step of one model: torch's own AdamW over the float32 masters, with hyper-parameters given anew at every step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tinsmith.errors import UserError
from tinsmith.models.full import Weights, training_bytes
from tinsmith.protocol.shapes import AdamSettings
from tinsmith.training.accumulation import Addition
from tinsmith.training.update_check import Bounds, configure, require_finite_step


class ModelOptimizer:
    """What one model trains, with gradient accumulators and AdamW's moments, all float32."""

    def __init__(self, weights: Weights, moments: Mapping[str, Tensor] | None = None) -> None:
        """Start anew, or from what the optimizer of a saved model remembered (`moments`)."""
        self.weights = weights
        self.gradients: list[Tensor] | None = None
        self.bounds: Bounds | None = None
        """How large weights and moments are at most; None if they must be measured."""
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

    def contribution(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """The gradients of one pass, in the order of `Weights.tensors`; None where the pass did not reach a tensor.

        They are added when what is returned is called. Making it may run out of memory and changes nothing; calling it cannot fail. The
        gradients belong to the optimizer from then on, and may be changed in place.
        """
        if self.gradients is not None:
            return Addition(self.gradients, gradients).add
        pairs = zip(self.weights.tensors(), gradients, strict=True)
        first = [torch.zeros_like(tensor) if gradient is None else gradient.float() for tensor, gradient in pairs]
        return partial(self._begin_with, first)

    def _begin_with(self, gradients: list[Tensor]) -> None:
        self.gradients = gradients

    def clear(self) -> None:
        """Forget what has been accumulated."""
        self.gradients = None

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Update the masters and clear the accumulators; returns metrics (`grad_norm` is taken before clipping).

        Without gradients nothing moves, as in torch. Raises UserError when the gradient or the update is not finite; weights and moments
        stay as they were then.
        """
        gradients, self.gradients = self.gradients, None
        if gradients is None:
            return {"grad_norm": 0.0, "learning_rate": settings.lr}
        total_norm = get_total_norm(gradients)
        metrics = {"grad_norm": total_norm.item(), "learning_rate": settings.lr}
        if not isfinite(metrics["grad_norm"]):
            raise UserError(
                f"the gradient norm is {metrics['grad_norm']}: the step was refused, the gradients are cleared and the weights stay as "
                "they were; look for infinite weights, -inf log-probabilities or a learning rate that is too high"
            )
        tensors = self.weights.tensors()
        try:
            for tensor, gradient in zip(tensors, gradients, strict=True):
                tensor.grad = gradient
            if settings.grad_clip_norm > 0:
                clip_grads_with_norm_(tensors, settings.grad_clip_norm, total_norm)
            bounds = self._checked(gradients, metrics["grad_norm"], settings)
            self._update(settings)
            self.bounds = bounds
        finally:
            for tensor in tensors:
                tensor.grad = None
        self.weights.refresh()
        return metrics

    def _checked(self, gradients: list[Tensor], grad_norm: float, settings: AdamSettings) -> Bounds | None:
        """The bounds after a step, None if they must be measured then. Raises UserError if the step is not finite."""
        if self.bounds is None:
            moments = self.moments().items()
            first, second = ([value for name, value in moments if name.endswith(entry)] for entry in (".exp_avg", ".exp_avg_sq"))
            self.bounds = Bounds.measured(self.weights.tensors(), first, second)
        after = self.bounds.after(grad_norm, settings)
        if after is None:
            require_finite_step(self.weights.named_tensors(), gradients, self.adamw, settings, self.weights.dtype)
        return after

    def _update(self, settings: AdamSettings) -> None:
        configure(self.adamw, settings)
        first = not self.moments()
        try:
            self.adamw.step()
        except RuntimeError:
            if first:  # out of memory: there are moments of some tensors now, and not of others
                self.adamw.state.clear()
            raise
