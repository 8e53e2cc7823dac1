"""Training on one base model in one process.

It holds the models and their optimizers, and divides work into passes (`step.py`). A pass that finds too little memory recomputes more
of itself (`memory/retries.py`), and one that fails in any other way, or still, is halved until the datum is found that fails.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch

from tinsmith.config import TrainingConfig
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import DeviceLostError, EngineUnavailableError, GivenUpError, NotFoundError, TinsmithError, UserError
from tinsmith.memory.budget import full_state
from tinsmith.memory.pass_memory import KEEP_ALL, Recomputation, pass_memory_of
from tinsmith.memory.retries import MemoryRetries, is_out_of_memory
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights, full_bytes, new_compact_weights, new_full_weights, snapshot_bytes
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.models.machine import free_memory, require_memory
from tinsmith.models.threads import threads_for, threads_for_step
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.rendering.packing import shared_rows
from tinsmith.training.captured_pass import CapturedPasses
from tinsmith.training.checkpoint import About, SavedState, copy_beside, copy_to_host, weights_from
from tinsmith.training.compact import CompactOptimizer, Optimizer
from tinsmith.training.loss_groups import DatumResult, DatumWork
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.parallel.all_reduce import step_together
from tinsmith.training.parallel.sequence_parallel import SequenceParallel
from tinsmith.training.parallel.state_part import StatePart
from tinsmith.training.step import run_packed

__all__ = ["DatumResult", "DatumWork", "LocalBackend", "PassError", "PassResult", "is_out_of_memory"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassResult:
    """Outcome of each datum: a result, or a failure that left no gradient."""

    results: list[DatumResult | None]
    """Results in the order of the work; None for a datum that failed."""
    failures: dict[int, str]
    """Reasons of failures, by index in the work."""


@dataclass(frozen=True)
class PassError:
    """Why a pass failed, without the tensors that an exception and its traceback hold."""

    reason: str
    out_of_memory: bool
    """Whether the same work may succeed in smaller passes."""


class LocalBackend:
    """Training on one base model, on its device. What copies weights raises UserError if the copy does not fit into the memory."""

    needs_all = False
    """Whether each of several workers must be given every pass, even one without a datum: they compute it together."""

    def __init__(self, base: BaseModel, config: TrainingConfig, group: ProcessGroup | None = None, eager: bool = False) -> None:
        """Join a `group`, if given, whose workers hold the same models and sum their gradients. `eager` forbids graphs of passes."""
        self.base = base
        self.group = group
        self.config = config
        self.tokens_per_pass = config.tokens_per_pass
        """Most tokens of one pass. It falls when memory runs out."""
        self.full_state = full_state(config)
        self.optimizers: dict[str, Optimizer] = {}
        memory = pass_memory_of(base.layout, base.text_config, base.dtype)
        self.memory_retries = MemoryRetries(memory, base.device, config.logits_chunk, self._promised)
        self.captured = CapturedPasses(base, memory, config.logits_chunk)
        self.captured.possible &= not eager
        self.sequences = None if group is None else SequenceParallel(base, config.logits_chunk, group, self._promised)
        self._look: Callable[[], None] | None = None
        """Callback of the current pass, called between layers."""
        self.host_share: float = math.inf
        """Bytes of the host's memory for what models of all backends keep there (--full-state compact-host)."""
        self.beside: Sequence[LocalBackend] = [self]
        """All backends of this process."""

    def share_host(self, share: int, beside: "Sequence[LocalBackend]") -> None:
        """Let models of all backends keep at most `share` bytes in the host's memory.

        All workers have the same models and share, so all refuse a model or none, whatever is free at the moment.
        """
        self.host_share, self.beside = share, beside

    def create_model(self, model_id: str, shape: LoraShape) -> None:
        """Create a model, of LoRA or of rank 0 with all its parameters, with a fresh optimizer."""
        self.optimizers[model_id] = self._new_optimizer(shape)

    def _new_optimizer(self, shape: LoraShape, state: SavedState | None = None) -> Optimizer:
        """Make the optimizer of a new model, or of a saved one."""
        base, moments = self.base, None if state is None else state.moments
        if shape.rank == 0:
            self._require_memory_to_train(shape)
            if self.full_state != "float32":
                tensors = base.full_targets(shape) if state is None else state.tensors
                compact = new_compact_weights(shape, tensors, base.dtype, base.device, self.full_state)
                return CompactOptimizer(compact, self.full_state, moments)
        if state is not None:
            return ModelOptimizer(weights_from(state, base), moments)
        if shape.rank == 0:
            return ModelOptimizer(new_full_weights(shape, base.full_targets(shape), base.dtype))
        return ModelOptimizer(new_adapter(shape, base.layout, base.device, base.dtype))

    def delete_model(self, model_id: str) -> None:
        self.optimizers.pop(model_id, None)

    def optim_step(self, model_id: str, settings: AdamSettings) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns metrics."""
        if self.group is not None:  # one that has no such model would let the others wait for its gradients
            self.group.agree(model_id in self.optimizers, f"whether model {model_id} is there")
        optimizer = self._optimizer(model_id)
        try:
            with threads_for_step(optimizer.weights.parameter_count):
                self._claim_moments(optimizer)
                return self._stepped(optimizer, settings)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TinsmithError(
                f"the step was refused, the gradients are cleared and the weights stay as they were: it needs more memory than "
                f"{self.base.device} has left; end other models or their sampling: {error}"
            ) from error

    def _claim_moments(self, optimizer: Optimizer) -> None:
        """Take what a first step takes, for which graphs give way: a step that lacks memory has lost its gradients."""
        if not self.captured.passes or not isinstance(optimizer, ModelOptimizer) or optimizer.totals is None:
            return
        with suppress(torch.OutOfMemoryError):
            optimizer.claim_moments()
            return
        self._give_back()

    def _stepped(self, optimizer: Optimizer, settings: AdamSettings) -> dict[str, float]:
        return optimizer.step(settings) if self.group is None else step_together(optimizer, settings, self.group)

    def clear_gradients(self, model_id: str) -> None:
        if model_id in self.optimizers:
            self.optimizers[model_id].clear()

    def snapshot(self, model_id: str, ref: WeightsRef) -> Weights:
        """Copy the model's weights, to sample from under the identity `ref`: later steps do not change the copy."""
        weights = self._optimizer(model_id).weights
        if isinstance(weights, FullWeights):
            size = snapshot_bytes(weights.parameter_count, weights.dtype)
            self._require_memory("a snapshot of full weights", size, self.base.device)
        return weights.snapshot(ref)

    def help_to_snapshot(self, model_id: str) -> None:
        """Give the worker that samples what its `snapshot` needs of this one; nothing here."""

    def agree_to_create(self, refusal: TinsmithError | None) -> None:
        """Before `create_model`, raise `refusal`, if there is one, on all workers that would compute the model together."""
        if refusal is not None:
            raise refusal

    def copy_state(self, model_id: str, optimizer: bool) -> SavedState:
        """Copy the weights, and with `optimizer` what AdamW remembers, but no gradients, for `checkpoint.write_state`.

        An adapter's copy lies on the device if that has room, so that training goes on after a few operations.
        """
        model = self._optimizer(model_id)
        return self.copied(model, About.of(self.base, model.weights.shape), optimizer)

    def copy_part(self, model_id: str, optimizer: bool) -> StatePart | None:
        """Copy this worker's part of a sharded model to host memory; None here, where each worker has all of it.

        To be called by all workers. If one cannot copy its part, the same error is raised on all.
        """
        return None

    def copied(self, model: Optimizer, about: About, optimizer: bool) -> SavedState:
        """Copy the state of a loaded model, described by `about`."""
        moments = model.moments() if optimizer else None
        size = model.weights.parameter_count * 4 * (3 if moments else 1)
        self._require_memory("the copy that is saved", size, torch.device("cpu"))
        if isinstance(model.weights, Adapter) and size <= free_memory(self.base.device) - self._promised():
            return copy_beside(about, model.weights, moments)
        return copy_to_host(about, model.weights, moments)

    def restore(self, model_id: str, state: SavedState) -> None:
        """Create the model from what `checkpoint.read_state` read, or replace it. Without moments the optimizer starts fresh.

        One of rank 0 is freed before its memory is taken again: if the load then fails, it starts anew from the base, or is gone if there
        is no memory for that either.
        """
        if state.about.shape.rank > 0 or model_id not in self.optimizers:
            self._load(model_id, state)
            return
        replaced = self.optimizers.pop(model_id).weights.shape
        try:
            self._load(model_id, state)
        except Exception:
            self.create_model(model_id, replaced)
            raise

    def _load(self, model_id: str, state: SavedState) -> None:
        self.optimizers[model_id] = self._new_optimizer(state.about.shape, state)

    def run_pass(self, work: Sequence[DatumWork], backward: bool, look: Callable[[], None] | None = None) -> PassResult:
        """Compute log-probabilities and losses of all datums, in as many passes as it takes; with `backward` accumulate gradients too.

        `look` is called between layers and may raise GivenUpError to end the pass, of which some gradients may stay. Work that fails is
        halved until a single datum fails, because it is bad or needs more memory than there is.
        """
        self._look = look
        results: list[DatumResult | None] = [None] * len(work)
        failures = {i: _not_loaded(datum.model_id) for i, datum in enumerate(work) if datum.model_id not in self.optimizers}
        there = [i for i in range(len(work)) if i not in failures]
        passes = deque(self._rows(work, there, backward))
        while passes:
            chosen = passes.popleft()
            part = [work[i] for i in chosen]
            outcome = self._compute(part, backward)
            if not isinstance(outcome, PassError):
                for i, result in zip(chosen, outcome, strict=True):
                    results[i] = result
            elif len(chosen) == 1:
                failures[chosen[0]] = self._reason(work[chosen[0]], outcome)
            else:
                if outcome.out_of_memory:
                    self._plan_smaller_passes(part)
                first = _half(part)
                passes.extendleft((chosen[first:], chosen[:first]))
        if self.tokens_per_pass < self.config.tokens_per_pass and self.memory_retries.may_grow():
            self.tokens_per_pass = min(2 * self.tokens_per_pass, self.config.tokens_per_pass)
            log.info("no pass ran out of memory for a while: they take up to %d tokens again", self.tokens_per_pass)
        return PassResult(results, failures)

    def _rows(self, work: Sequence[DatumWork], there: Sequence[int], backward: bool) -> list[list[int]]:
        """Return rows as indices: models share one if they can, unless a graph for each alone takes less time."""
        rows = [[there[place] for place in row] for row in shared_rows([self._optimizer(work[i].model_id).weights for i in there])]
        return [part for row in rows for part in (self._apart(work, row) if backward else [row])]

    def _apart(self, work: Sequence[DatumWork], row: list[int]) -> list[list[int]]:
        models: dict[str, list[int]] = {}
        for i in row:
            models.setdefault(work[i].model_id, []).append(i)
        if len(models) == 1 or any(work[i].rendered.images for i in row):
            return [row]
        texts: list[tuple[list[int], Adapter]] = []
        for model, own in models.items():
            weights = self._optimizer(model).weights
            if isinstance(weights, Adapter):
                texts.append(([len(work[i].rendered) for i in own], weights))
        return list(models.values()) if len(texts) == len(models) and self.captured.are_faster_apart(texts) else [row]

    def run_together(self, number: int, work: DatumWork | TinsmithError, backward: bool) -> DatumResult:
        """Compute one sequence, of which every worker computes a slice (`SequenceParallel.run`)."""
        if self.sequences is None:
            raise TinsmithError("this worker is alone: it computes no sequence together with others")
        return self.sequences.run(number, work, backward, self._optimizer)

    def _compute(self, work: Sequence[DatumWork], backward: bool) -> list[DatumResult] | PassError:
        """Compute one pass, with as much recomputation as it takes to fit into the memory."""
        tokens = sum(len(datum.rendered) for datum in work)
        recomputation = self.memory_retries.first(tokens, backward)
        if recomputation != KEEP_ALL and self._give_back():
            recomputation = self.memory_retries.first(tokens, backward)
        while True:
            outcome = self._attempt(work, backward, recomputation)
            if not isinstance(outcome, PassError):
                self.memory_retries.succeeded()
                return outcome
            if not outcome.out_of_memory:
                return outcome
            if self._give_back():
                continue
            more = self.memory_retries.more(recomputation, tokens, alone=len(work) == 1) if backward else None
            if more is None:
                return outcome
            recomputation = more
            where = ", with their inputs in host memory" if recomputation.offload else ""
            log.warning("out of memory in a pass of %d tokens: it recomputes %d layers%s", tokens, recomputation.recompute, where)

    def _attempt(self, work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> list[DatumResult] | PassError:
        """Compute one pass; an error is returned, so that the tensors of the failed pass are free before the next one starts."""
        tokens = sum(len(datum.rendered) for datum in work)
        try:
            # Gradients of full weights are no part of the estimate, and would be most of what is measured. Graphs take nothing anew.
            counts = backward and not self.captured.may_have(tokens)
            counts &= not any(self._optimizer(datum.model_id).weights.shape.rank == 0 for datum in work)
            with threads_for(self.base, tokens), self.memory_retries.measured(tokens, recomputation) if counts else nullcontext():
                return self._run(work, backward, recomputation)
        except (DeviceLostError, GivenUpError, EngineUnavailableError):  # the last two are of looking for what was dropped meanwhile
            raise
        except Exception as error:
            if is_out_of_memory(error):
                return PassError(str(error), out_of_memory=True)
            # An error other than memory is first seen here: of a datum that a check let through, of our code, or of the device.
            log.warning("a pass of %d datums failed", len(work), exc_info=len(work) == 1)
            return PassError(f"{type(error).__name__}: {error}", out_of_memory=False)

    def _run(self, work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> list[DatumResult]:
        optimizers = [self._optimizer(datum.model_id) for datum in work]
        return run_packed(self.base, work, optimizers, backward, self.config.logits_chunk, recomputation, self._look, self.captured)

    def _reason(self, datum: DatumWork, error: PassError) -> str:
        if not error.out_of_memory:
            return f"the pass failed: {error.reason}"
        needs = f"a sequence of {len(datum.rendered)} tokens needs more memory than {self.base.device} has left"
        return f"the pass failed: {needs}: {error.reason}"

    def _plan_smaller_passes(self, work: Sequence[DatumWork]) -> None:
        """Plan later passes no larger than half of this work, for which the memory did not suffice."""
        total = sum(len(datum.rendered) for datum in work)
        self.tokens_per_pass = max(1, min(self.tokens_per_pass, total // 2))
        log.warning("out of memory in a pass of %d tokens: it goes on in two, later ones take %d tokens", total, self.tokens_per_pass)

    def _give_back(self) -> bool:
        """Free the memory of graphs, and what torch keeps for tensors of other sizes. Returns whether there were graphs."""
        gave_way = self.captured.give_way()
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        return gave_way

    def _optimizer(self, model_id: str) -> Optimizer:
        if model_id not in self.optimizers:
            raise NotFoundError(_not_loaded(model_id))
        return self.optimizers[model_id]

    def _require_memory_to_train(self, shape: LoraShape) -> None:
        parameters = sum(parameter.numel() for parameter in self.base.full_targets(shape).values())
        needed = full_bytes(parameters, self.base.dtype, self.full_state)
        purpose = f"full-parameter training of {self.base.name}"
        self._require_memory(purpose, needed.device, self.base.device)
        if needed.host:
            kept = f"what {purpose} keeps in host memory (--full-state compact-host)"
            self._require_memory(kept, needed.host, torch.device("cpu"))
            taken = sum(backend.kept_on_host() for backend in self.beside)
            if taken + needed.host > self.host_share:
                raise UserError(
                    f"{kept} is {needed.host / 2**30:.4g} GiB for each worker, and of the {self.host_share / 2**30:.4g} GiB that each may "
                    f"take of its host {max(0.0, self.host_share - taken) / 2**30:.4g} are free; end other models, train with LoRA "
                    "(lora_config.rank of 1 or more), or start fewer --workers"
                )

    def kept_on_host(self) -> int:
        """Bytes that models keep in the host's memory, or will when they have taken a step."""
        sizes = [model.weights.parameter_count for model in self.optimizers.values() if isinstance(model, CompactOptimizer)]
        return sum(full_bytes(size, self.base.dtype, self.full_state).host for size in sizes)

    def _require_memory(self, purpose: str, needed: int, device: torch.device) -> None:
        """Raise UserError if `device` lacks these free bytes, beside what the models on it will still take when they train."""
        if device == self.base.device and needed > free_memory(device) - self._promised() and self.captured.held:
            self._give_back()
        require_memory(purpose, needed, device, self._promised() if device == self.base.device else 0)

    def _promised(self) -> int:
        """Bytes of the device that models will still take when they train, and those of graphs, which look free."""
        return self.captured.held + sum(model.unclaimed for model in self.optimizers.values())


def _not_loaded(model_id: str) -> str:
    return f"model {model_id} is not loaded; create it anew"


def _half(work: Sequence[DatumWork]) -> int:
    """Return the index that cuts work into two parts of about equal tokens, neither of them empty."""
    before = np.cumsum([0, *(len(datum.rendered) for datum in work)])
    return min(max(1, int((before[:-1] < before[-1] / 2).sum())), len(work) - 1)
