"""Optimizer of all weights of a model that are sharded over workers: each has AdamW for its part.

AdamW computes number by number, so a step of the parts is a step of the whole. Agreed on are the norm of the gradient,
and whether the step is taken at all; what may fail on one worker alone comes before that.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from tinsmith.errors import TinsmithError, UserError
from tinsmith.protocol.shapes import AdamSettings
from tinsmith.training.optimizer import GradientAccumulator, ModelOptimizer, fatal, norm_of, require_finite_norm
from tinsmith.training.parallel.all_reduce import state_after
from tinsmith.training.parallel.joint_work import failing_on_all
from tinsmith.training.parallel.sharded_weights import ShardedWeights
from tinsmith.training.update_check import ENTRIES


class ShardedAccumulator(GradientAccumulator):
    """This worker's parts of gradients that workers sum pass by pass. A pass counts if all computed their datums."""

    weights: ShardedWeights

    def __init__(self, weights: ShardedWeights) -> None:
        super().__init__(weights)
        self.around: Sequence[Tensor | None] = []
        """Gradients of a pass: of the tensors around the layers, on this worker."""
        self.of_pass: list[Tensor] = []
        """This worker's part of the gradients of all workers, of each row."""

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(part.nbytes for part in self.of_pass)

    def begin_pass(self) -> None:
        """Take the memory for the gradients of a pass. May fail on one worker alone."""
        self.around = [None] * len(self.weights.working)
        self.of_pass = [torch.empty_like(master, requires_grad=False) for master in self.weights.tensors()]
        self.weights.layers.gradients = self.of_pass[: len(self.weights.layers.rows)]

    def contribution(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Keep those of the tensors around the layers, which `keep_pass` adds up."""
        self.around = [None if gradient is None else gradient.contiguous() for gradient in gradients[:-1]]
        return _nothing

    def keep_pass(self) -> None:
        """Add the gradients of a pass to the totals.

        To be called by all workers, when all have computed it; takes no memory.
        """
        weights = self.weights
        count = len(weights.layers.rows)
        for row, gradient, part in zip(
            list(weights.rows.values())[count:], self.around, self.of_pass[count:], strict=True
        ):
            weights.sums.begin(row, [gradient], part)
        weights.sums.wait()
        if self.totals is None:
            self.totals = self.of_pass
        else:
            torch._foreach_add_(self.totals, self.of_pass)
        self.drop_pass()

    def drop_pass(self) -> None:
        self.around, self.of_pass, self.weights.layers.gradients = [], [], None


class ShardedOptimizer(ModelOptimizer):
    """This worker's parts of what one model trains."""

    sums_passes = True
    accumulator: ShardedAccumulator

    def __init__(self, weights: ShardedWeights, needed: int) -> None:
        """Start anew. `needed` is what training takes in all, in bytes."""
        super().__init__(weights)
        self.sharded = weights
        self.accumulator = ShardedAccumulator(weights)
        self.needed = needed

    def take(self, moments: Mapping[str, Tensor]) -> None:
        """Go on from what the optimizer of a checkpoint remembered, by the names of the parameters."""
        self.claim_moments()
        weights = self.sharded
        for name, row in weights.rows.items():
            state = self.adamw.state[weights.masters[name]]
            for entry in ENTRIES:
                row.fill(
                    state[entry],
                    weights.group.place.rank * row.part,
                    [moments[f"{each}.{entry}"] for each in row.shapes],
                )
            state["step"].copy_(moments[f"{next(iter(row.shapes))}.step"])

    def parts_of(self, entry: str) -> dict[str, Tensor]:
        """Return the optimizer's tensors that are laid out like the masters, by row name.

        The next step changes them.
        """
        return {name: self.adamw.state[master][entry] for name, master in self.sharded.masters.items()}

    @property
    def unclaimed(self) -> int:
        weights = self.sharded
        moments: list[Tensor] = [tensor for state in self.adamw.state.values() for tensor in state.values()]
        held = self.accumulator.nbytes + sum(tensor.nbytes for tensor in moments)
        return max(0, self.needed - weights.nbytes - held)

    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Take a step together: all workers call this, and all take it or, whatever one of them lacks, none."""
        group = self.sharded.group
        totals = self.accumulator.take()
        group.agree(totals is not None, "whether a model has gradients")
        if totals is None:
            return {"grad_norm": 0.0, "learning_rate": settings.lr}
        grad_norm = self._norm_of_all(totals)
        require_finite_norm(grad_norm)
        with self._lent(totals) as buffers:
            with failing_on_all(group, UserError, RuntimeError, MemoryError):
                if settings.grad_clip_norm > 0:
                    clip_grads_with_norm_(
                        buffers, settings.grad_clip_norm, torch.tensor(grad_norm, device=group.device)
                    )
                bounds = self._checked(totals, grad_norm, settings)
            with fatal(f"{group.place.name} failed within a step of all workers"):
                self._update(settings)
                self.sharded.refresh()
                state = state_after(self, grad_norm)
            group.agree(state, "what a step left")
        self.bounds = bounds
        return {"grad_norm": grad_norm, "learning_rate": settings.lr}

    def _norm_of_all(self, totals: Sequence[Tensor]) -> float:
        """Return the norm of all workers' gradient.

        Raises on all, without new moments, if one has no memory for the step.
        """
        first = not self.moments()
        try:
            with failing_on_all(self.sharded.group, RuntimeError, MemoryError):
                self.claim_moments()
                squares = norm_of(totals).item() ** 2
        except TinsmithError:
            if first:  # or the next that is saved would wait for moments that one worker does not have
                self.adamw.state.clear()
            raise
        heard = self.sharded.group.gather(struct.unpack("<q", struct.pack("<d", squares))[0])
        return math.sqrt(math.fsum(struct.unpack("<d", struct.pack("<q", bits))[0] for bits in heard))


def _nothing() -> None:
    """Add nothing: `keep_pass` does."""
