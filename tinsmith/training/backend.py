"""Training on one base model in one process: its models and their optimizers, their snapshots and saved states."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from weakref import WeakValueDictionary

import torch

from tinsmith.config import TrainingConfig
from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.memory.budget import snapshot_bytes
from tinsmith.memory.retries import is_out_of_memory
from tinsmith.models.base import BaseModel, threads_for_step
from tinsmith.models.full import FullWeights, Weights, new_compact_weights, new_full_weights
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.models.machine import free_memory
from tinsmith.protocol.shapes import AdamSettings, LoraShape, WeightsRef
from tinsmith.training.checkpoint import About, SavedState, copy_beside, copy_to_host, weights_from
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.losses import DatumResult, DatumWork
from tinsmith.training.model_memory import ModelMemory
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.parallel.all_reduce import all_reduce_step
from tinsmith.training.parallel.checkpoint_shard import CheckpointShard
from tinsmith.training.parallel.joint_work import failing_on_all
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sequence_parallel import SequenceParallel
from tinsmith.training.pass_runner import PassResult, PassRunner, not_loaded

__all__ = ["DatumResult", "DatumWork", "LocalBackend", "PassResult"]


class LoadedModels(dict[str, Optimizer]):
    """Optimizers by model ID. Raises NotFoundError for a model that is not loaded."""

    def __missing__(self, model_id: str) -> Optimizer:
        raise NotFoundError(not_loaded(model_id))


class LocalBackend:
    """Training on one base model, on its device.

    What copies weights raises UserError if the copy does not fit into the memory.
    """

    needs_all = False
    """Whether each of several workers must be given every pass, even one without a datum: they compute it together."""

    def __init__(
        self, base: BaseModel, config: TrainingConfig, group: ProcessGroup | None = None, eager: bool = False
    ) -> None:
        """Join a `group`, if given, whose workers hold the same models and sum their gradients.

        `eager` forbids graphs of passes.
        """
        self.base = base
        self.group = group
        self.config = config
        self.optimizers = LoadedModels()
        self.frozen = WeakValueDictionary[str, Adapter]()
        """The last snapshot of each model that has not changed since and whose snapshot is still there."""
        self.memory = ModelMemory(base, config, self.optimizers)
        self.memory.captured.possible &= not eager
        self.passes = PassRunner(self.memory, config, self.optimizers)
        self.sequences = None if group is None else SequenceParallel(config.logits_chunk, group, self.memory)

    def create_model(self, model_id: str, shape: LoraShape) -> None:
        """Create a model, of LoRA or of rank 0 with all its parameters, with a fresh optimizer.

        Raises UserError if there is no place for it, beside those that are loaded.
        """
        self._place(model_id, shape)

    def _place(self, model_id: str, shape: LoraShape, state: SavedState | None = None) -> None:
        """Make a model, for which others leave the device if they must, in the place of what has its ID."""
        pager, former, size = self.memory.pager, self.optimizers.get(model_id), self.memory.lora_bytes(shape)
        pager.bring([])  # none is used now
        if shape.rank > 0:
            pager.require_place(size, former)
            pager.make_room(size)
        optimizer = self._new_optimizer(shape, state)
        self._drop(model_id)
        if isinstance(optimizer, ModelOptimizer) and isinstance(optimizer.weights, Adapter):
            pager.add(optimizer, optimizer.weights, size)
        self.optimizers[model_id] = optimizer

    def _drop(self, model_id: str) -> Optimizer | None:
        """Forget a model, and return it if it was there."""
        optimizer = self.optimizers.pop(model_id, None)
        self.frozen.pop(model_id, None)
        self.memory.pager.forget(optimizer)
        return optimizer

    def _new_optimizer(self, shape: LoraShape, state: SavedState | None = None) -> Optimizer:
        """Make the optimizer of a new model, or of a saved one."""
        base, moments = self.base, None if state is None else state.moments
        if shape.rank == 0:
            self.memory.require_to_train(shape)
            if self.memory.full_state != "float32":
                tensors = base.full_targets(shape) if state is None else state.tensors
                compact = new_compact_weights(shape, tensors, base.dtype, base.device, self.memory.full_state)
                return CompactOptimizer(compact, self.memory.full_state, moments)
        if state is not None:
            return ModelOptimizer(weights_from(state, base), moments)
        if shape.rank == 0:
            return ModelOptimizer(new_full_weights(shape, base.full_targets(shape), base.dtype))
        return ModelOptimizer(new_adapter(shape, base.layout, base.device, base.dtype))

    def delete_model(self, model_id: str) -> None:
        self._drop(model_id)

    def optim_step(self, model_id: str, settings: AdamSettings) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns metrics."""
        if self.group is not None:  # one that has no such model would let the others wait for its gradients
            self.group.agree(model_id in self.optimizers, f"whether model {model_id} is there")
        optimizer = self.optimizers[model_id]
        self.frozen.pop(model_id, None)
        try:
            with _refused_without_memory(self.base.device), threads_for_step(optimizer.weights.parameter_count):
                self._bring_to_step(optimizer)
                self.memory.claim_moments(optimizer)
                if self.group is None or optimizer.sums_passes:
                    return optimizer.step(settings)
                return all_reduce_step(optimizer, settings, self.group)
        finally:
            self.memory.pager.freed()

    def _bring_to_step(self, optimizer: Optimizer) -> None:
        """Bring a model to the devices of all workers; its gradients are cleared on all if one has no room for it."""
        pager, group = self.memory.pager, self.group if self.memory.pager.is_limited else None
        try:
            with (
                failing_on_all(group, TinsmithError, RuntimeError, MemoryError) if group else nullcontext(),
                _refused_without_memory(self.base.device),
            ):
                pager.bring([optimizer])
        except Exception:
            optimizer.accumulator.totals = None
            raise

    def clear_gradients(self, model_id: str) -> None:
        if model_id in self.optimizers:
            self.optimizers[model_id].accumulator.totals = None
            self.memory.pager.freed()

    def snapshot(self, model_id: str, ref: WeightsRef) -> Weights:
        """Copy the model's weights, to sample from under the identity `ref`: later steps do not change the copy.

        A LoRA model that has not changed since its last snapshot is not copied again.
        """
        weights = self.optimizers[model_id].weights
        if (last := self.frozen.get(model_id)) is not None:
            self.frozen[model_id] = last = last.under(ref)
            return last
        self.memory.pager.bring([self.optimizers[model_id]])
        if isinstance(weights, FullWeights):
            size = snapshot_bytes(weights.parameter_count, weights.dtype)
            self.memory.require("a snapshot of full weights", size, self.base.device)
        else:
            self.memory.pager.make_way(weights.nbytes)
        copied = weights.snapshot(ref)
        if isinstance(copied, Adapter):
            self.frozen[model_id] = copied
        return copied

    def help_to_snapshot(self, model_id: str) -> None:
        """Give the worker that samples what its `snapshot` needs of this one; nothing here."""

    def agree_to_create(self, refusal: TinsmithError | None) -> None:
        """Raise `refusal`, if any, before `create_model`, on all workers that would compute the model together."""
        if refusal is not None:
            raise refusal

    def copy_state(self, model_id: str, optimizer: bool) -> SavedState:
        """Copy the weights, and with `optimizer` what AdamW remembers, but no gradients, for `checkpoint.write_state`.

        An adapter's copy lies on the device if that has room, so that training goes on after a few operations.
        """
        model = self.optimizers[model_id]
        return self.copied(model, About.of(self.base, model.weights.shape), optimizer)

    def copy_part(self, model_id: str, optimizer: bool) -> CheckpointShard | None:
        """Copy this worker's part of a sharded model to host memory; None here, where each worker has all of it.

        To be called by all workers. If one cannot copy its part, the same error is raised on all.
        """
        return None

    def copied(self, model: Optimizer, about: About, optimizer: bool) -> SavedState:
        """Copy the state of a loaded model, described by `about`."""
        self.memory.pager.bring([model])
        size = model.weights.parameter_count * 4 * (3 if optimizer and model.has_moments else 1)
        has_room = size <= free_memory(self.base.device) - self.memory.promised()
        if has_room and isinstance(model, ModelOptimizer) and isinstance(model.weights, Adapter):
            return copy_beside(about, model.weights, model.copied_moments() if optimizer else None)
        self.memory.require("the copy that is saved", size, torch.device("cpu"))
        return copy_to_host(about, model.weights, model.moments() if optimizer else None)

    def restore(self, model_id: str, state: SavedState) -> None:
        """Create the model from what `checkpoint.read_state` read, or replace it.

        Without moments the optimizer starts fresh.

        One of rank 0 is freed before its memory is taken again: if the load then fails, it starts anew from the base,
        or is gone if there is no memory for that either.
        """
        shape = state.about.shape
        with ExitStack() as failing:
            if shape.rank == 0 and (former := self._drop(model_id)) is not None:
                failing.callback(self.create_model, model_id, former.weights.shape)
                del former
            self._place(model_id, shape, state)
            failing.pop_all()

    def run_pass(self, work: Sequence[DatumWork], backward: bool, look: Callable[[], None] | None = None) -> PassResult:
        """Compute datums of any models (`PassRunner.run`)."""
        return self.passes.run(work, backward, look)

    def run_together(self, number: int, work: DatumWork | TinsmithError, backward: bool) -> DatumResult:
        """Compute one sequence, of which every worker computes a slice (`SequenceParallel.run`)."""
        if self.sequences is None:
            raise TinsmithError("this worker is alone: it computes no sequence together with others")
        return self.sequences.run(number, work, backward)


@contextmanager
def _refused_without_memory(device: torch.device) -> Iterator[None]:
    """Say what became of a step for which memory ran out."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TinsmithError(
            "the step was refused, the gradients are cleared and the weights stay as they were: "
            f"it needs more memory than {device} has left; end other models or their sampling: {error}"
        ) from error
