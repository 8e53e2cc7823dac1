"""Training on a base model whose layers are sharded over the workers: every worker takes part in every pass.

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
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from tinsmith.config import TrainingConfig
from tinsmith.distributed.joint_work import failing_together, refuse_together
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import DeviceLostError, TinsmithError, UserError
from tinsmith.memory.pass_memory import Recomputation, pass_memory_of
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullState, FullWeights, Weights, snapshot_bytes
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend, PassError, PassResult
from tinsmith.training.checkpoint import About, SavedState
from tinsmith.training.compact import Optimizer
from tinsmith.training.optimizer import fatal
from tinsmith.training.parallel.sharded_layers import ShardedDecoder
from tinsmith.training.parallel.sharded_optimizer import ShardedOptimizer
from tinsmith.training.parallel.sharded_weights import ShardedWeights, bytes_of, gathered, take_from_base
from tinsmith.training.parallel.state_part import StatePart
from tinsmith.training.update_check import ENTRIES

NOTHING, FROZEN = 0, 1
"""Numbers that workers exchange for no work and for the base's layers; each model with weights of its own has a larger one."""

Outcome = list[DatumResult] | PassError


class ShardedBackend(LocalBackend):
    """The backend of one of several workers that share the layers of the base."""

    needs_all = True

    def __init__(self, base: BaseModel, config: TrainingConfig, group: ProcessGroup, gives_snapshots: bool = False) -> None:
        """Take a `base` that `shard` has sharded. With `gives_snapshots` this worker samples, and can take snapshots of all weights."""
        super().__init__(base, config, group)
        self.gives_snapshots = gives_snapshots
        if not isinstance(base.decoder, ShardedDecoder):
            raise TypeError(f"the layers of {base.name} are not sharded")
        self.together = group
        self.layers = base.decoder.sharded
        self.neighbours = group.workers_beside()[group.place.rank]
        """Number of workers on this host."""
        self.memory_retries.memory = pass_memory_of(base.layout, base.text_config, base.dtype, sharded=True)

    # ---- Models

    def agree_to_create(self, refusal: TinsmithError | None) -> None:
        refuse_together(self.together, refusal)

    def create_model(self, model_id: str, shape: LoraShape) -> None:
        """Create a model. To be called by all workers, with rank 0 at the same place among passes and other calls."""
        if shape.rank > 0:
            super().create_model(model_id, shape)
            return
        with failing_together(self.together, UserError, RuntimeError, MemoryError):
            optimizer = self._new_sharded(shape)
        with self._fatal("all took the weights of the base"):
            take_from_base(optimizer.sharded, self.base)
        self.optimizers[model_id] = optimizer

    def restore(self, model_id: str, state: SavedState) -> None:
        """Restore a model without any exchange: files are read at any time. One of rank 0 is gone if the load fails."""
        if state.about.shape.rank == 0:
            self.optimizers.pop(model_id, None)
        self._load(model_id, state)

    def _load(self, model_id: str, state: SavedState) -> None:
        shape = state.about.shape
        if shape.rank > 0:
            super()._load(model_id, state)
            return
        optimizer = self._new_sharded(shape)
        for name in optimizer.sharded.rows:
            optimizer.sharded.take(name, state.tensors)
        if state.moments:
            optimizer.take(state.moments)
        self.optimizers[model_id] = optimizer

    def _new_sharded(self, shape: LoraShape) -> ShardedOptimizer:
        """Create a model whose weights have no numbers yet. Raises UserError if this mode, or the memory of this worker, cannot."""
        require_float32_state(self.base, self.full_state)
        needed = bytes_of(self.base, shape, self.together.count)
        self._require_memory(f"a worker's part of full-parameter training of {self.base.name}", needed.device, self.base.device)
        return ShardedOptimizer(ShardedWeights(self.base, shape, self.together), needed.device)

    def _stepped(self, optimizer: Optimizer, settings: AdamSettings) -> dict[str, float]:
        # Gradients of sharded weights were summed pass by pass.
        return optimizer.step(settings) if isinstance(optimizer, ShardedOptimizer) else super()._stepped(optimizer, settings)

    # ---- Copies that are sampled

    def snapshot(self, model_id: str, ref: WeightsRef) -> Weights:
        """Take a snapshot while all others call `help_to_snapshot`: all weights come to the host's memory.

        Raises UserError for a model that is sharded where nothing samples, so that nobody helps.
        """
        model = self._agreed(model_id) if self.gives_snapshots else None
        if model is None:
            return super().snapshot(model_id, ref)
        with failing_together(self.together, Exception):
            size = snapshot_bytes(model.weights.parameter_count, self.base.dtype)
            self._require_memory("a snapshot of full weights", size, torch.device("cpu"))
            tensors = _empty(model.sharded, self.base.dtype)
        with self._fatal("all put a snapshot together"):
            gathered(model.sharded, model.sharded.parts, tensors)
        return FullWeights(model.weights.shape, tensors, self.base.dtype, ref)

    def help_to_snapshot(self, model_id: str) -> None:
        model = self._agreed(model_id)
        if model is not None:
            refuse_together(self.together, None)
            with self._fatal("all put a snapshot together"):
                gathered(model.sharded, model.sharded.parts, None)

    # ---- What is saved

    def copy_part(self, model_id: str, optimizer: bool) -> StatePart | None:
        """Copy this worker's part of the weights; None of an adapter, of which each worker has all. To be called by all workers."""
        model = self._agreed(model_id)
        if model is None:
            return None
        with failing_together(self.together, Exception):
            return self._copied_part(model_id, model, optimizer)

    def _copied_part(self, model_id: str, model: ShardedOptimizer, optimizer: bool) -> StatePart:
        weights, place = model.sharded, self.together.place
        size = sum(master.nbytes for master in weights.masters.values()) * (3 if optimizer and model.moments() else 1)
        self._require_memory("what the workers of this host copy to save it", size * self.neighbours, torch.device("cpu"))
        about = About.of(self.base, weights.shape) if place.writes(model_id) else None
        moments: dict[str, dict[str, Tensor]] | None = {} if optimizer else None
        step = None
        if moments is not None and model.moments():
            moments |= {entry: _on_host(model.parts_of(entry)) for entry in ENTRIES}
            step = next(iter(model.adamw.state.values()))["step"].to("cpu", copy=True)
        return StatePart(about, weights.rows, place.rank, _on_host(weights.masters), moments, step)

    def _agreed(self, model_id: str) -> ShardedOptimizer | None:
        """Return a model that all workers have; None if it is not sharded. Raises NotFoundError if none of them has it."""
        self.together.agree(model_id in self.optimizers, f"whether model {model_id} is there")
        model = self._optimizer(model_id)
        return model if isinstance(model, ShardedOptimizer) else None

    def _fatal(self, what: str) -> AbstractContextManager[None]:
        """Return the context of an exchange that nobody may leave alone: the others would wait for this worker."""
        return fatal(f"{self.together.place.name} failed while {what}")

    # ---- Passes

    def run_pass(self, work: Sequence[DatumWork], backward: bool, look: Callable[[], None] | None = None) -> PassResult:
        """Compute a pass. To be called by all workers, also by those that have no work; `look` is never called."""
        what = zlib.crc32(f"{'forward_backward' if backward else 'forward'} on {self.base.name}".encode())
        self.together.agree(what, "the pass that comes next")
        with self._fatal("all computed a pass"):
            result = super().run_pass(work, backward)
            self._help_until(NOTHING, backward)
        return result

    def _attempt(self, work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> Outcome:
        compute = partial(super()._attempt, work, backward, recomputation)
        model = self._optimizer(work[0].model_id)  # one with all weights has the pass to itself
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
        while (chosen := next(filter(None, self.together.gather(wanted)), NOTHING)) != wanted:
            if chosen == FROZEN:
                self.layers.begin(backward)
                self.layers.finish()
                continue
            model = next((model for model_id, model in self.optimizers.items() if _number_of(model_id) == chosen), None)
            if not isinstance(model, ShardedOptimizer):
                raise DeviceLostError(f"{self.together.place.name} has no part of a model that another one is to compute")
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
        if any(self.together.gather(isinstance(outcome, PassError))):
            model.drop_pass()
            return outcome if isinstance(outcome, PassError) else None
        model.keep_pass()
        return outcome

    def _without_room(self, model: ShardedOptimizer) -> PassError | None:
        """Take the memory for the gradients of a pass; returns why there is none on all workers."""
        lacking: PassError | None = None
        try:
            model.begin_pass()
        except (RuntimeError, MemoryError) as error:
            lacking = PassError(str(error), out_of_memory=True)
        if not any(self.together.gather(lacking is not None)):
            return None
        model.drop_pass()
        return lacking or PassError("another worker has no memory for its part of the gradients", out_of_memory=False)


def _number_of(model_id: str) -> int:
    """Number that workers exchange for this model: the same on all, and neither NOTHING nor FROZEN."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7]) + 2


def _empty(weights: ShardedWeights, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for row in weights.rows.values() for name, shape in row.shapes.items()}


def _on_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.detach().to("cpu", copy=True) for name, part in parts.items()}


def require_float32_state(base: BaseModel, state: FullState) -> None:
    """Raise UserError for a state of full-parameter training that is not sharded."""
    if state != "float32":
        raise UserError(
            f"the server shards the weights of {base.name} over its workers (--shard weights), and what it remembers of all weights is "
            f"float32 then: it takes no --full-state {state}; serve with --full-state float32, or with --shard none"
        )
