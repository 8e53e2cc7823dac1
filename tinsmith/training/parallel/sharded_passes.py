"""Passes over a base model whose layers are sharded over the workers: every worker takes part in every pass.

Gathering is a collective, so a pass is a number of attempts in which all take part. The lowest rank with work decides which layers come
next: the base's, with LoRA, or those of one full-parameter model. Ranks that need the same ones compute, the others only contribute
their slices. The pass ends when no rank has work left. A rank is without work if its share is empty or done, while another repeats
its share in halves after it ran out of memory.

A LoRA attempt that fails concerns its own worker alone. Gradients of all weights are summed over all workers during the backward
(`sharded_weights.py`), so if such an attempt fails on one, all drop their sums, and those that did not fail compute it again.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, TinsmithError
from tinsmith.memory.pass_memory import Recomputation
from tinsmith.memory.retries import PassFailure, attempted
from tinsmith.training.compact import Optimizer
from tinsmith.training.loss_groups import DatumWork
from tinsmith.training.model_memory import ModelMemory
from tinsmith.training.optimizer import fatal
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sharded_layers import ShardedLayers
from tinsmith.training.parallel.sharded_optimizer import ShardedOptimizer
from tinsmith.training.pass_runner import Outcome, PassResult, PassRunner

NOTHING, FROZEN = 0, 1
"""Numbers that workers exchange for no work and for the base's layers; each model with weights of its own has a larger one."""


class ShardedPasses(PassRunner):
    """Computes the work of one of several workers that share the layers of the base."""

    def __init__(
        self, memory: ModelMemory, config: TrainingConfig, optimizers: Mapping[str, Optimizer], group: ProcessGroup, layers: ShardedLayers
    ) -> None:
        super().__init__(memory, config, optimizers, sharded=True)
        self.group = group
        self.layers = layers

    def run(self, work: Sequence[DatumWork], backward: bool, look: Callable[[], None] | None = None) -> PassResult:
        """Compute a pass. To be called by all workers, also by those that have no work; `look` is never called."""
        what = zlib.crc32(f"{'forward_backward' if backward else 'forward'} on {self.base.name}".encode())
        self.group.agree(what, "the pass that comes next")
        with fatal(f"{self.group.place.name} failed while all computed a pass"):
            result = super().run(work, backward)
            self._help_until(NOTHING, backward)
        return result

    def _attempt(self, work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> Outcome:
        compute = partial(super()._attempt, work, backward, recomputation)
        model = self.optimizers[work[0].model_id]  # one with all weights has the pass to itself
        if isinstance(model, ShardedOptimizer):
            outcome = None
            while outcome is None:
                self._help_until(_number_of(work[0].model_id), backward)
                outcome = self._with_all_weights(model, backward, compute)
            return outcome
        self._help_until(FROZEN, backward)
        self.layers.begin(backward)
        found = compute()
        self.layers.finish()
        return found

    def _help_until(self, wanted: int, backward: bool) -> None:
        """Contribute to others' attempts until the layers of this worker's work come next."""
        while (chosen := next(filter(None, self.group.gather(wanted)), NOTHING)) != wanted:
            if chosen == FROZEN:
                self.layers.begin(backward)
                self.layers.finish()
                continue
            model = next((model for model_id, model in self.optimizers.items() if _number_of(model_id) == chosen), None)
            if not isinstance(model, ShardedOptimizer):
                raise DeviceLostError(f"{self.group.place.name} has no part of a model that another one is to compute")
            self._with_all_weights(model, backward, list)

    def _with_all_weights(self, model: ShardedOptimizer, backward: bool, compute: Callable[[], Outcome]) -> Outcome | None:
        """Compute with a model's own weights, on all workers; None if another has failed, so that it is to be done again."""
        layers = model.sharded.layers
        if backward and (lacking := self._without_room(model)) is not None:
            return lacking
        layers.begin(backward)
        outcome = compute()
        layers.finish()
        if not backward:
            return outcome
        if any(self.group.gather(isinstance(outcome, PassFailure))):
            model.accumulator.drop_pass()
            return outcome if isinstance(outcome, PassFailure) else None
        model.accumulator.keep_pass()
        return outcome

    def _without_room(self, model: ShardedOptimizer) -> PassFailure | None:
        """Take the memory for the gradients of a pass; returns why there is none on all workers."""
        lacking = attempted(model.accumulator.begin_pass)
        if not any(self.group.gather(lacking is not None)):
            return None
        model.accumulator.drop_pass()
        others = "another worker has no memory for its part of the gradients"
        return lacking or PassFailure(TinsmithError.__name__, others, out_of_memory=False)


def _number_of(model_id: str) -> int:
    """Number that workers exchange for this model: the same on all, and neither NOTHING nor FROZEN."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7]) + 2
