"""One optimizer step of one model: torch's own AdamW over the float32 masters, with hyper-parameters given anew at every step.

On a GPU, full weights in half precision take the same step in kernels of ours (`adamw_kernels.py`), which move fewer bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tinsmith.errors import DeviceLostError, UserError
from tinsmith.models.dispatch import on_kernels
from tinsmith.models.full import FullWeights, Weights, training_bytes
from tinsmith.models.split_masters import SplitMasters
from tinsmith.protocol.shapes import AdamSettings
from tinsmith.training.accumulation import Addition, apart
from tinsmith.training.update_check import Bounds, configure, require_finite_step

NORM_PIECE = 2**16
"""Numbers whose squares are added up before they meet the others: on a CPU float32 loses digits in longer sums. A GPU does so by itself."""


class ModelOptimizer:
    """Gradient accumulators and AdamW's moments of one model, all float32 and laid out like `Weights.buffers`.

    Where a step is taken in kernels, the gradients of a single pass stay as they came until others are added to them.
    """

    def __init__(self, weights: Weights, moments: Mapping[str, Tensor] | None = None) -> None:
        """Start anew, or from what the optimizer of a saved model remembered (`moments`), which is copied from wherever it lies."""
        self.weights = weights
        self.totals: list[Tensor] | None = None
        """The gradients that have been accumulated; None before the first. Those of a single pass may be in the base's precision."""
        self.bounds: Bounds | None = None
        """Upper bounds of weights and moments; None if they must be measured."""
        self.kernels: Any = import_module("tinsmith.training.adamw_kernels") if _steps_in_kernels(weights) else None
        """The module that takes the steps, where torch does not."""
        self.steps: int | None = None
        """Number of steps; None if the moments must be asked, because steps were taken outside of the kernels."""
        self.adamw = torch.optim.AdamW(weights.buffers(), lr=0.0, fused=True)
        if moments:
            self._remember(moments)

    def _remember(self, moments: Mapping[str, Tensor]) -> None:
        """Take over what `moments` returned once: that of all tensors, after the same number of steps."""
        buffers = self.weights.buffers()
        for buffer in buffers:
            self.adamw.state[buffer] = _fresh_state(buffer)
        places = self.moments()
        for name, value in moments.items():
            places[name].copy_(value)
        for buffer in buffers[1:]:
            self.adamw.state[buffer]["step"].copy_(self.adamw.state[buffers[0]]["step"])

    def moments(self) -> dict[str, Tensor]:
        """AdamW's moments, as TENSOR.step, TENSOR.exp_avg and TENSOR.exp_avg_sq; empty before the first step.

        These are the optimizer's own tensors: the next step changes them. All tensors of a model have made the same steps.
        """
        states = [self.adamw.state[buffer] for buffer in self.weights.buffers()]
        if not all(states):
            return {}
        firsts, seconds = (self.weights.cut([state[entry] for state in states]) for entry in ("exp_avg", "exp_avg_sq"))
        found: dict[str, Tensor] = {}
        for name, first, second in zip(self.weights.named_tensors(), firsts, seconds, strict=True):
            found |= {f"{name}.step": states[0]["step"], f"{name}.exp_avg": first, f"{name}.exp_avg_sq": second}
        return found

    @property
    def gradients(self) -> list[Tensor] | None:
        """Accumulated gradients, float32, in the order of `Weights.tensors`; None before the first."""
        return self.weights.cut(_wide(self.totals)) if self.totals is not None else None

    @property
    def unclaimed(self) -> int:
        """Bytes that the model will take when it is trained, beyond what it holds now."""
        moments: list[Tensor] = [tensor for state in self.adamw.state.values() for tensor in state.values()]
        held = sum(tensor.nbytes for tensor in (*(self.totals or []), *moments))
        return training_bytes(self.weights.parameter_count, self.weights.dtype) - self.weights.nbytes - held

    def contribution(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """The gradients of one pass, in the order of `Weights.tensors`; None where the pass did not reach a tensor.

        They are added when what is returned is called. Making it may run out of memory and changes nothing; calling it cannot fail. The
        gradients belong to the optimizer from then on, and may be changed in place.
        """
        joined = self.weights.joined(gradients)
        if self.totals is not None:
            self.widen()
            return Addition(self.totals, joined).add
        return partial(self._begin_with, apart(joined if self.kernels else _wide(joined)))

    def _begin_with(self, totals: list[Tensor]) -> None:
        self.totals = totals

    def widen(self) -> None:
        """Let what has been accumulated be float32. May run out of memory, and changes no number then.

        One tensor after the other: there need not be room for all in both precisions.
        """
        totals = self.totals or []
        for index, total in enumerate(totals):
            totals[index] = total.float()

    def begin_with_zeros(self) -> None:
        """Accumulate from 0 where nothing has been accumulated."""
        like = self.weights.buffers()
        self.totals = [torch.zeros_like(buffer, requires_grad=False, memory_format=torch.contiguous_format) for buffer in like]

    def claim_moments(self) -> None:
        """Take the memory of the moments before the first step, which begins with them at 0."""
        for buffer in self.weights.buffers():
            if not self.adamw.state[buffer]:
                self.adamw.state[buffer] = _fresh_state(buffer)

    def clear(self) -> None:
        """Forget what has been accumulated."""
        self.totals = None

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Update the masters and clear the accumulators; returns metrics (`grad_norm` is taken before clipping).

        Without gradients nothing moves, as in torch. Raises UserError when the gradient or the update is not finite; weights and moments
        stay as they were then.
        """
        totals, self.totals = self.totals, None
        if totals is None:
            return {"grad_norm": 0.0, "learning_rate": settings.lr}
        total_norm = norm_of(totals)
        metrics = {"grad_norm": total_norm.item(), "learning_rate": settings.lr}
        require_finite_norm(metrics["grad_norm"])
        if self.kernels:
            self._step_in_kernels(totals, metrics["grad_norm"], settings)
            return metrics
        buffers = self.weights.buffers()
        try:
            for buffer, total in zip(buffers, totals, strict=True):
                buffer.grad = total
            if settings.grad_clip_norm > 0:
                clip_grads_with_norm_(buffers, settings.grad_clip_norm, total_norm)
            bounds = self._checked(totals, metrics["grad_norm"], settings)
            self._update(settings)
            self.bounds = bounds
        finally:
            for buffer in buffers:
                buffer.grad = None
        self.weights.refresh()
        return metrics

    def _step_in_kernels(self, totals: list[Tensor], grad_norm: float, settings: AdamSettings) -> None:
        """Update masters, moments and working copies. Raises DeviceLostError if that fails halfway: then the weights are of no step."""
        limit = settings.grad_clip_norm
        scale = min(1.0, limit / (grad_norm + 1e-6)) if limit > 0 else 1.0  # as torch clips
        bounds = self._checked(totals, grad_norm, settings, scale)
        first = not any(self.adamw.state.values())
        try:
            self.claim_moments()
        except RuntimeError:
            if first:  # out of memory: there are moments of some tensors now, and not of others
                self.adamw.state.clear()
            raise
        states = [self.adamw.state[buffer] for buffer in self.weights.buffers()]
        if self.steps is None:
            self.steps = 0 if first else int(states[0]["step"].item())
        factors = self.kernels.Factors.of(settings, self.steps + 1, scale)
        try:  # all memory is there; a kernel that cannot be compiled is what may still fail
            for master, total, state, leaf in zip(self.weights.buffers(), totals, states, self.weights.leaves(), strict=True):
                self.kernels.step(master, total, state["exp_avg"], state["exp_avg_sq"], leaf, factors)
            torch._foreach_add_([state["step"] for state in states], 1)
        except Exception as error:
            raise DeviceLostError(f"a step failed when it had changed some of the weights: {error!r}") from error
        self.steps += 1
        self.bounds = bounds

    def _checked(self, totals: list[Tensor], grad_norm: float, settings: AdamSettings, scale: float = 1.0) -> Bounds | None:
        """The bounds after a step, None if they must be measured then. Raises UserError if the step is not finite.

        `scale` is what clipping still multiplies the gradients with.
        """
        buffers = self.weights.buffers()
        if self.bounds is None:
            states = [state for buffer in buffers if (state := self.adamw.state[buffer])]
            first, second = ([state[entry] for state in states] for entry in ("exp_avg", "exp_avg_sq"))
            self.bounds = Bounds.measured(buffers, first, second)
        after = self.bounds.after(grad_norm, settings)
        if after is None:
            gradients = self.weights.cut(totals)
            require_finite_step(self.weights.named_tensors(), gradients, self.moments(), settings, self.weights.dtype, scale)
        return after

    def _update(self, settings: AdamSettings) -> None:
        configure(self.adamw, settings)
        first = not any(self.adamw.state.values())
        try:
            self.adamw.step()
        except RuntimeError:
            if first:  # out of memory: there are moments of some tensors now, and not of others
                self.adamw.state.clear()
            raise


def norm_of(totals: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector."""
    if totals[0].device.type == "cpu":
        return get_total_norm([piece.float() for total in totals for piece in total.flatten().split(NORM_PIECE)])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(totals), 2, torch.float32)))
    return norm


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in float32: copies of those that are not."""
    return [tensor.float() for tensor in tensors]


def _steps_in_kernels(weights: Weights) -> bool:
    """Whether `adamw_kernels` updates these weights."""
    if not isinstance(weights, FullWeights) or isinstance(weights.masters, SplitMasters):
        return False
    return on_kernels(weights.leaves()[0])


def require_finite_norm(grad_norm: float) -> None:
    """Raise UserError if a step must be refused because of its gradient."""
    if not isfinite(grad_norm):
        raise UserError(
            f"the gradient norm is {grad_norm}: the step was refused, the gradients are cleared and the weights stay as "
            "they were; look for infinite weights, -inf log-probabilities or a learning rate that is too high"
        )


def _fresh_state(buffer: Tensor) -> dict[str, Tensor]:
    """Return the state of torch's fused AdamW for a tensor before its first step."""
    step = torch.zeros((), dtype=torch.float32, device=buffer.device)
    moments = {name: torch.zeros_like(buffer, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": step, **moments}
