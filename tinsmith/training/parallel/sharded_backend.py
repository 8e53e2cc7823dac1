"""Training on a base model whose layers are sharded over the workers: models, their copies and what is saved of them.

What all workers do together comes to all in the same order, and what may fail on one alone is agreed on before.
"""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.memory.budget import snapshot_bytes
from tinsmith.memory.pass_memory import Recomputation
from tinsmith.memory.retries import PassFailure, attempted
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.training.backend import LocalBackend
from tinsmith.training.checkpoint import About, SavedState
from tinsmith.training.compact import Optimizer
from tinsmith.training.losses import DatumWork
from tinsmith.training.model_memory import ModelMemory
from tinsmith.training.optimizer import fatal
from tinsmith.training.parallel.checkpoint_shard import CheckpointShard
from tinsmith.training.parallel.joint_work import failing_on_all, raise_on_all
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sharded_layers import ShardedDecoder, ShardedLayers
from tinsmith.training.parallel.sharded_optimizer import ShardedOptimizer
from tinsmith.training.parallel.sharded_weights import ShardedWeights, bytes_of, gathered, take_from_base
from tinsmith.training.pass_runner import Outcome, PassResult, PassRunner
from tinsmith.training.update_check import ENTRIES

# Passes over a base model whose layers are sharded over the workers: every worker takes part in every pass.
#
# Gathering is a collective, so a pass is a number of attempts in which all take part. The lowest rank with work decides
# which layers come next: the base's, with LoRA, or those of one full-parameter model. Ranks that need the same ones
# compute, the others only contribute their slices. The pass ends when no rank has work left. A rank is without work if
# its share is empty or done, while another repeats its share in halves after it ran out of memory.
#
# A LoRA attempt that fails concerns its own worker alone. Gradients of all weights are summed over all workers during
# the backward (`sharded_weights.py`), so if such an attempt fails on one, all drop their sums, and those that did not
# fail compute it again.

NOTHING, FROZEN = 0, 1
"""Numbers that workers exchange for no work and for the base's layers. Each full-parameter model has a larger one."""


class ShardedPasses(PassRunner):
    """Computes the work of one of several workers that share the layers of the base."""

    def __init__(
        self,
        memory: ModelMemory,
        config: TrainingConfig,
        optimizers: Mapping[str, Optimizer],
        group: ProcessGroup,
        layers: ShardedLayers,
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

    def _with_all_weights(
        self, model: ShardedOptimizer, backward: bool, compute: Callable[[], Outcome]
    ) -> Outcome | None:
        """Compute with a model's own weights on all workers; None if another failed, so that it must be done again."""
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


# The models of such a base: created, copied, saved and loaded by all workers together.


class ShardedBackend(LocalBackend):
    """The backend of one of several workers that share the layers of the base."""

    needs_all = True
    group: ProcessGroup
    passes: ShardedPasses

    def __init__(
        self, base: BaseModel, config: TrainingConfig, group: ProcessGroup, gives_snapshots: bool = False
    ) -> None:
        """Take a `base` that `shard` has sharded.

        With `gives_snapshots` this worker samples, and can take snapshots of all weights.
        """
        super().__init__(base, config, group)
        self.gives_snapshots = gives_snapshots
        if not isinstance(base.decoder, ShardedDecoder):
            raise TypeError(f"the layers of {base.name} are not sharded")
        self.passes = ShardedPasses(self.memory, config, self.optimizers, group, base.decoder.sharded)
        self.neighbours = group.workers_beside()[group.place.rank]
        """Number of workers on this host."""

    # ---- Models

    def agree_to_create(self, refusal: TinsmithError | None) -> None:
        raise_on_all(self.group, refusal)

    def create_model(self, model_id: str, shape: LoraShape) -> None:
        """Create a model. To be called by all workers, with rank 0 at the same place among passes and other calls."""
        if shape.rank > 0:
            super().create_model(model_id, shape)
            return
        self.memory.pager.bring([])  # none is used now
        with failing_on_all(self.group, UserError, RuntimeError, MemoryError):
            optimizer = self._new_sharded(shape)
        with self._fatal("all took the weights of the base"):
            take_from_base(optimizer.sharded, self.base)
        self.optimizers[model_id] = optimizer

    def restore(self, model_id: str, state: SavedState) -> None:
        """Restore a model without any exchange: files are read at any time. One of rank 0 is gone if the load fails."""
        if state.about.shape.rank == 0:
            self._drop(model_id)
        super().restore(model_id, state)

    def _new_optimizer(self, shape: LoraShape, state: SavedState | None = None) -> Optimizer:
        if shape.rank > 0 or state is None:
            return super()._new_optimizer(shape, state)
        optimizer = self._new_sharded(shape)
        for name in optimizer.sharded.rows:
            optimizer.sharded.take(name, state.tensors)
        if state.moments:
            optimizer.take(state.moments)
        return optimizer

    def _new_sharded(self, shape: LoraShape) -> ShardedOptimizer:
        """Create a model whose weights have no numbers yet.

        Raises UserError if this mode, or the memory of this worker, cannot.
        """
        if self.memory.full_state != "float32":
            raise UserError(
                f"the server shards the weights of {self.base.name} over its workers (--shard weights), "
                "and what it remembers of all weights is float32 then: it takes no --full-state "
                f"{self.memory.full_state}; serve with --full-state float32, or with --shard none"
            )
        needed = bytes_of(self.base, shape, self.group.count)
        self.memory.require(
            f"a worker's part of full-parameter training of {self.base.name}", needed.device, self.base.device
        )
        return ShardedOptimizer(ShardedWeights(self.base, shape, self.group), needed.device)

    # ---- Copies that are sampled

    def snapshot(self, model_id: str, ref: WeightsRef) -> Weights:
        """Take a snapshot while all others call `help_to_snapshot`: all weights come to the host's memory.

        Raises UserError for a model that is sharded where nothing samples, so that nobody helps.
        """
        model = self._agreed(model_id) if self.gives_snapshots else None
        if model is None:
            return super().snapshot(model_id, ref)
        with failing_on_all(self.group, Exception):
            size = snapshot_bytes(model.weights.parameter_count, self.base.dtype)
            self.memory.require("a snapshot of full weights", size, torch.device("cpu"))
            tensors = _empty(model.sharded, self.base.dtype)
        with self._fatal("all put a snapshot together"):
            gathered(model.sharded, model.sharded.parts, tensors)
        return FullWeights(model.weights.shape, tensors, self.base.dtype, ref)

    def help_to_snapshot(self, model_id: str) -> None:
        model = self._agreed(model_id)
        if model is not None:
            raise_on_all(self.group, None)
            with self._fatal("all put a snapshot together"):
                gathered(model.sharded, model.sharded.parts, None)

    # ---- What is saved

    def copy_part(self, model_id: str, optimizer: bool) -> CheckpointShard | None:
        """Copy this worker's part of the weights; None of an adapter, of which each worker has all.

        To be called by all workers.
        """
        model = self._agreed(model_id)
        if model is None:
            return None
        with failing_on_all(self.group, Exception):
            return self._copied_part(model_id, model, optimizer)

    def _copied_part(self, model_id: str, model: ShardedOptimizer, optimizer: bool) -> CheckpointShard:
        weights, place = model.sharded, self.group.place
        size = sum(master.nbytes for master in weights.masters.values()) * (3 if optimizer and model.moments() else 1)
        self.memory.require(
            "what the workers of this host copy to save it", size * self.neighbours, torch.device("cpu")
        )
        about = About.of(self.base, weights.shape) if place.writes(model_id) else None
        moments: dict[str, dict[str, Tensor]] | None = {} if optimizer else None
        step = None
        if moments is not None and model.moments():
            moments |= {entry: _on_host(model.parts_of(entry)) for entry in ENTRIES}
            step = next(iter(model.adamw.state.values()))["step"].to("cpu", copy=True)
        return CheckpointShard(about, weights.rows, place.rank, _on_host(weights.masters), moments, step)

    def _agreed(self, model_id: str) -> ShardedOptimizer | None:
        """Return a model that all workers have; None if it is not sharded.

        Raises NotFoundError if none of them has it.
        """
        self.group.agree(model_id in self.optimizers, f"whether model {model_id} is there")
        model = self.optimizers[model_id]
        return model if isinstance(model, ShardedOptimizer) else None

    def _fatal(self, what: str) -> AbstractContextManager[None]:
        """Return the context of an exchange that nobody may leave alone: the others would wait for this worker."""
        return fatal(f"{self.group.place.name} failed while {what}")


def _empty(weights: ShardedWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: torch.empty(shape, dtype=dtype) for row in weights.rows.values() for name, shape in row.shapes.items()
    }


def _on_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.detach().to("cpu", copy=True) for name, part in parts.items()}
