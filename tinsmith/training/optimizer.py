"""The optimizer of one model: AdamW's moments, its gradients over the passes since the last step, and the step.

The step is torch's own AdamW over the float32 masters. On a GPU, full weights in half precision take the same step in
kernels of ours (`kernels/adamw.py`), which move fewer bytes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import accumulate
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from tinsmith.errors import DeviceLostError, UserError
from tinsmith.kernels.adamw_formula import Factors
from tinsmith.kernels.dispatch import on_kernels
from tinsmith.memory.budget import full_bytes
from tinsmith.models.full import FullWeights, SplitMasters, Weights
from tinsmith.protocol.shapes import AdamSettings
from tinsmith.training.update_check import ENTRIES, Bounds, clip_scale, configure, require_finite_step

# Gradients of one model, accumulated over passes until a step takes them.
#
# A pass serves several models. If memory ran out while their gradients are added, the pass would be computed again and
# some gradients would count twice. So everything that allocates is done when a contribution is made (`Addition`); to
# add it only writes to tensors that exist.

BUFFER_SIZE = 2**22
"""Numbers that are converted to float32 at a time."""

Batch = tuple[list[Tensor], list[Tensor]]
"""Parts of the float32 totals, and of the gradients to add to them."""


class GradientAccumulator:
    """Sums of gradients in float32, laid out like `Weights.buffers`."""

    def __init__(self, weights: Weights, keeps_first: bool = False) -> None:
        """With `keeps_first`, gradients of a single pass stay in the precision of the base."""
        self.weights = weights
        self.keeps_first = keeps_first
        self.totals: list[Tensor] | None = None
        """None before the first gradients."""

    @property
    def gradients(self) -> list[Tensor] | None:
        """Accumulated gradients, float32, in the order of `Weights.tensors`; None before the first."""
        return self.weights.cut(_wide(self.totals)) if self.totals is not None else None

    @property
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self.totals or ())

    def take(self) -> list[Tensor] | None:
        """Return the totals, and begin anew."""
        totals, self.totals = self.totals, None
        return totals

    def contribution(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Return a function that adds the gradients of one pass, which belong to it from now on.

        They come in the order of `Weights.tensors`, None where the pass did not reach a tensor. This may run out of
        memory, and changes nothing then; calling what it returns cannot fail.
        """
        joined = self.weights.joined(gradients)
        if self.totals is not None:
            self.widen()
            return Addition(self.totals, joined).add
        return partial(self._begin_with, apart(joined if self.keeps_first else _wide(joined)))

    def _begin_with(self, totals: list[Tensor]) -> None:
        self.totals = totals

    def widen(self) -> None:
        """Turn accumulated gradients into float32, tensor by tensor: both precisions need not fit at once."""
        totals = self.totals or []
        for index, total in enumerate(totals):
            totals[index] = total.float()

    def begin_with_zeros(self) -> None:
        like = self.weights.buffers()
        self.totals = [
            torch.zeros_like(buffer, requires_grad=False, memory_format=torch.contiguous_format) for buffer in like
        ]


def _wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


class Addition:
    """The gradients of one pass for one model. Making it may run out of memory; `add` cannot."""

    def __init__(self, totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take `totals` in float32.

        A GPU converts gradients of another precision as it adds; a CPU needs a buffer for that.
        """
        pairs = list(zip(totals, gradients, strict=True))
        self._whole = _batch([pair for pair in pairs if pair[1].dtype == torch.float32 or pair[1].is_cuda])
        converted = list(_batches([pair for pair in pairs if pair[1].dtype != torch.float32 and not pair[1].is_cuda]))
        size = max((sum(part.numel() for part in parts) for _, parts in converted), default=0)
        buffer = torch.empty(size, dtype=torch.float32, device=totals[0].device)
        self._converted = [(*batch, _views(buffer, batch[1])) for batch in converted]

    def add(self) -> None:
        """Add the gradients to the totals. Allocates nothing."""
        totals, gradients = self._whole
        if totals:
            torch._foreach_add_(totals, gradients)
        for parts, narrow, wide in self._converted:
            torch._foreach_copy_(wide, narrow)
            torch._foreach_add_(parts, wide)


def apart(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Copy those that share their memory: autograd may give one tensor for two leaves, or a part of one."""
    seen: set[int] = set()
    found = []
    for gradient in gradients:
        place = gradient.untyped_storage().data_ptr()
        alone = (
            gradient.is_contiguous() and gradient.untyped_storage().nbytes() == gradient.nbytes and place not in seen
        )
        found.append(gradient if alone else gradient.clone(memory_format=torch.contiguous_format))
        seen.add(place)
    return found


def _batch(pairs: Sequence[tuple[Tensor, Tensor]]) -> Batch:
    return [total for total, _ in pairs], [gradient for _, gradient in pairs]


def _batches(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[Batch]:
    """Yield neighbouring tensors, or rows of a large one, of BUFFER_SIZE numbers together; one row may be larger."""
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for total, gradient in pairs:
        rows = max(1, BUFFER_SIZE * len(total) // max(1, total.numel()))
        for part in zip(total.split(rows), gradient.split(rows), strict=True):
            if batch and size + part[0].numel() > BUFFER_SIZE:
                yield _batch(batch)
                batch, size = [], 0
            batch.append(part)
            size += part[0].numel()
    if batch:
        yield _batch(batch)


def _views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut the beginning of a flat buffer into views of the shapes of `like`."""
    ends = accumulate(part.numel() for part in like)
    return [buffer[end - part.numel() : end].view(part.shape) for end, part in zip(ends, like, strict=True)]


# The step that takes them.

NORM_PIECE = 2**16
"""Numbers whose squares are added up before they meet the others: on a CPU float32 loses digits in longer sums."""

STEP_FAILED = "a step failed when it had changed some of the weights"


class ModelOptimizer:
    """AdamW's moments of one model, float32 and laid out like `Weights.buffers`."""

    sums_passes = False
    """Whether all workers sum gradients at each pass, not at a step (`parallel/sharded_optimizer.py`)."""

    def __init__(self, weights: Weights, moments: Mapping[str, Tensor] | None = None) -> None:
        """Start anew, or from a copy of a saved model's `moments`."""
        self.weights = weights
        self.bounds: Bounds | None = None
        """Upper bounds of weights and moments; None if they must be measured."""
        self.kernels: Any = import_module("tinsmith.kernels.adamw") if _steps_in_kernels(weights) else None
        """Module that takes the steps in place of torch."""
        self.accumulator = GradientAccumulator(weights, keeps_first=self.kernels is not None)
        self.steps: int | None = None
        """Number of steps in kernels; None if the moments must be asked."""
        self.adamw = torch.optim.AdamW(weights.buffers(), lr=0.0, fused=True)
        if moments:
            self._remember(moments)

    def _remember(self, moments: Mapping[str, Tensor]) -> None:
        buffers = self.weights.buffers()
        self.claim_moments()
        places = self.moments()
        for name, value in moments.items():
            places[name].copy_(value)
        for buffer in buffers[1:]:
            self.adamw.state[buffer]["step"].copy_(self.adamw.state[buffers[0]]["step"])

    def moments(self) -> dict[str, Tensor]:
        """AdamW's own tensors, as TENSOR.step, TENSOR.exp_avg and TENSOR.exp_avg_sq; empty before the first step."""
        return self._named(self._states)

    def copied_moments(self) -> Callable[[], dict[str, Tensor]]:
        """Copy the moments, where they lie, in few operations. What is returned gives the copies their names."""
        return partial(self._named, [{name: each.clone() for name, each in state.items()} for state in self._states])

    @property
    def has_moments(self) -> bool:
        """Whether a step has been taken."""
        return bool(self._states)

    @property
    def _states(self) -> list[dict[str, Tensor]]:
        """AdamW's tensors for each buffer; none before the first step."""
        states = [self.adamw.state[buffer] for buffer in self.weights.buffers()]
        return states if all(states) else []

    def _named(self, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        if not states:
            return {}
        firsts, seconds = (self.weights.cut([state[entry] for state in states]) for entry in ENTRIES)
        found: dict[str, Tensor] = {}
        for name, first, second in zip(self.weights.named_tensors(), firsts, seconds, strict=True):
            found |= {f"{name}.step": states[0]["step"], f"{name}.exp_avg": first, f"{name}.exp_avg_sq": second}
        return found

    @property
    def unclaimed(self) -> int:
        """Bytes that the model will take when it is trained, beyond what it holds now."""
        moments: list[Tensor] = [tensor for state in self.adamw.state.values() for tensor in state.values()]
        held = self.accumulator.nbytes + sum(tensor.nbytes for tensor in moments)
        return (
            full_bytes(self.weights.parameter_count, self.weights.dtype, "float32").device - self.weights.nbytes - held
        )

    def claim_moments(self) -> None:
        """Take the memory of the moments, which begin at 0: of all tensors or, if it runs out, of none."""
        self.adamw.state.update(
            {buffer: _fresh_state(buffer) for buffer in self.weights.buffers() if not self.adamw.state[buffer]}
        )

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Update the masters and clear the accumulators; returns metrics (`grad_norm` is taken before clipping).

        Without gradients nothing moves.

        Raises UserError if gradient or update are not finite; no weight or moment has changed then.
        """
        totals = self.accumulator.take()
        if totals is None:
            return {"grad_norm": 0.0, "learning_rate": settings.lr}
        total_norm = norm_of(totals)
        metrics = {"grad_norm": total_norm.item(), "learning_rate": settings.lr}
        require_finite_norm(metrics["grad_norm"])
        if self.kernels:
            self._step_in_kernels(totals, metrics["grad_norm"], settings)
            return metrics
        with self._lent(totals) as buffers:
            if settings.grad_clip_norm > 0:
                clip_grads_with_norm_(buffers, settings.grad_clip_norm, total_norm)
            bounds = self._checked(totals, metrics["grad_norm"], settings)
            self._update(settings)
            self.bounds = bounds
        self.weights.refresh()
        return metrics

    @contextmanager
    def _lent(self, totals: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the masters, which have these gradients while the body runs."""
        buffers = self.weights.buffers()
        try:
            for buffer, total in zip(buffers, totals, strict=True):
                buffer.grad = total
            yield buffers
        finally:
            for buffer in buffers:
                buffer.grad = None

    def _step_in_kernels(self, totals: list[Tensor], grad_norm: float, settings: AdamSettings) -> None:
        """Update masters, moments and working copies."""
        scale = clip_scale(grad_norm, settings)
        bounds = self._checked(totals, grad_norm, settings, scale)
        self.claim_moments()
        states = [self.adamw.state[buffer] for buffer in self.weights.buffers()]
        if self.steps is None:
            self.steps = int(states[0]["step"].item())
        factors = Factors.of(settings, self.steps + 1, scale)
        with fatal(STEP_FAILED):  # all memory is there; a kernel that cannot be compiled is what may still fail
            for master, total, state, leaf in zip(
                self.weights.buffers(), totals, states, self.weights.leaves(), strict=True
            ):
                self.kernels.step(master, total, state["exp_avg"], state["exp_avg_sq"], leaf, factors)
            torch._foreach_add_([state["step"] for state in states], 1)
        self.steps += 1
        self.bounds = bounds

    def _checked(
        self, totals: list[Tensor], grad_norm: float, settings: AdamSettings, scale: float = 1.0
    ) -> Bounds | None:
        """Return the bounds after a step, None if they must be measured then.

        Raises UserError if the step is not finite.

        `scale` is what clipping still multiplies the gradients with.
        """
        buffers = self.weights.buffers()
        if self.bounds is None:
            states = [state for buffer in buffers if (state := self.adamw.state[buffer])]
            first, second = ([state[entry] for state in states] for entry in ENTRIES)
            self.bounds = Bounds.measured(buffers, first, second)
        after = self.bounds.after(grad_norm, settings)
        if after is None:
            gradients = self.weights.cut(totals)
            require_finite_step(
                self.weights.named_tensors(), gradients, self.moments(), settings, self.weights.dtype, scale
            )
        return after

    def _update(self, settings: AdamSettings) -> None:
        configure(self.adamw, settings)
        self.claim_moments()
        self.adamw.step()


def norm_of(totals: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients as one vector."""
    if totals[0].device.type == "cpu":
        return get_total_norm([piece.float() for total in totals for piece in total.flatten().split(NORM_PIECE)])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(totals), 2, torch.float32)))
    return norm


def _steps_in_kernels(weights: Weights) -> bool:
    """Whether `kernels/adamw.py` updates these weights."""
    if not isinstance(weights, FullWeights) or isinstance(weights.masters, SplitMasters):
        return False
    return on_kernels("adamw", weights.leaves()[0])


@contextmanager
def fatal(what: str) -> Iterator[None]:
    """Turn any error of the body into DeviceLostError: it leaves weights or workers in no state to go on from."""
    try:
        yield
    except DeviceLostError:
        raise
    except Exception as error:
        raise DeviceLostError(f"{what}: {error!r}") from error


def require_finite_norm(grad_norm: float) -> None:
    """Raise UserError if a step must be refused because of its gradient."""
    if not isfinite(grad_norm):
        raise UserError(
            f"the gradient norm is {grad_norm}: the step was refused, the gradients are cleared and the weights stay "
            "as they were; look for infinite weights, -inf log-probabilities or a learning rate that is too high"
        )


def _fresh_state(buffer: Tensor) -> dict[str, Tensor]:
    """Return the state that torch's fused AdamW begins with."""
    step = torch.zeros((), dtype=torch.float32, device=buffer.device)
    moments = {name: torch.zeros_like(buffer, requires_grad=False) for name in ENTRIES}
    return {"step": step, **moments}
