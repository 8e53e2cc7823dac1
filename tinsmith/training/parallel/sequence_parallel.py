"""Computes one sequence on all workers together, because it is too long for one (sequence parallelism).

Each worker computes a slice of the tokens (`sequence_slices.py`), and the loss of the whole sequence from the gathered log-probabilities.
Its backward takes the gradient of its own slice alone: a step, which sums over all workers, counts every token once. Whatever fails, fails
on all (`joint_work.py`).
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import TinsmithError
from tinsmith.kernels.device import upload
from tinsmith.memory.pass_memory import Recomputation, sliced_pass_memory_of
from tinsmith.memory.retries import Choice, MemoryRetries, PassFailure
from tinsmith.models.base import BaseModel
from tinsmith.models.recompute import kept_in_host_memory
from tinsmith.models.threads import threads_for
from tinsmith.protocol.work import error_of
from tinsmith.rendering.packing import pack
from tinsmith.training.compact import Optimizer
from tinsmith.training.logprobs import rows_to_keep, target_logprobs
from tinsmith.training.loss_groups import DatumResult, DatumWork, LossGroup, Scored, targets_per_position, trained_positions
from tinsmith.training.parallel.joint_work import JointWork
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.parallel.sequence_slices import SequenceParallelPlan, SequenceSlices, slices_of
from tinsmith.training.step import results_and_gradients

log = logging.getLogger(__name__)

SHORTEST_SLICE = 16
"""Fewest tokens of a worker: more than a convolution reaches back."""

Computed = tuple[DatumResult, list[Callable[[], None]]]
"""The result of a sequence, and what adds its gradients."""


class SequenceParallel:
    """Sequences that all workers of a group compute together. `promised` returns free bytes of the device that others will still take."""

    def __init__(
        self, base: BaseModel, logits_chunk: int, group: ProcessGroup, optimizers: Mapping[str, Optimizer], promised: Callable[[], int]
    ) -> None:
        self.base = base
        self.logits_chunk = logits_chunk
        self.group = group
        self.optimizers = optimizers
        self.joint = JointWork(group)
        memory = sliced_pass_memory_of(base.layout, base.text_config, base.dtype, group.count)
        self.memory_retries = MemoryRetries(memory, base.device, logits_chunk, promised, agree=self._most_of_all)

    def run(self, number: int, work: DatumWork | TinsmithError, backward: bool) -> DatumResult:
        """Compute one datum, which is the pass `number`; with `backward` its gradients go to the optimizer of its model.

        `work` may be why this worker cannot compute it. Raises the same error on all workers if one cannot, and DeviceLostError if they are
        not at the same pass.
        """
        self.group.agree(number, "the pass that comes next")
        ready = self.joint.attempt(lambda: self._ready(work))
        if isinstance(ready, PassFailure):
            raise error_of(ready.error_type, ready.reason)
        datum, optimizer = ready
        tokens = -(-len(datum.rendered) // self.group.count)
        outcome = self.memory_retries.run(partial(self._attempt, datum, optimizer, backward), tokens, backward, alone=True)
        if isinstance(outcome, PassFailure):
            needs = f"a sequence of {len(datum.rendered)} tokens needs more memory than {self.group.count} workers together have left: "
            raise TinsmithError(f"the pass failed: {needs if outcome.out_of_memory else ''}{outcome.reason}")
        result, ready_to_add = outcome
        for add in ready_to_add:  # from here on nothing allocates, on no worker
            add()
        return result

    def _ready(self, work: DatumWork | TinsmithError) -> tuple[DatumWork, Optimizer]:
        """Return the datum and the optimizer of its model. Raises what keeps this worker from computing it."""
        if isinstance(work, TinsmithError):
            raise work
        if len(work.rendered) < SHORTEST_SLICE * self.group.count:
            raise TinsmithError(f"a sequence of {len(work.rendered)} tokens is too short to be divided among {self.group.count} workers")
        return work, self.optimizers[work.model_id]

    def _most_of_all(self, choose: Choice) -> Recomputation | None:
        """Return the most that any worker chooses, because what is computed again exchanges again; None if one has nothing to choose."""
        own = self.joint.attempt(choose)
        if isinstance(own, PassFailure):
            raise error_of(own.error_type, own.reason)
        chosen = self.group.gather(-1 if own is None else 2 * own.recompute + own.offload)
        return None if min(chosen) < 0 else Recomputation(max(chosen) // 2, max(chosen) % 2 == 1)

    def _attempt(self, datum: DatumWork, optimizer: Optimizer, backward: bool, recomputation: Recomputation) -> Computed | PassFailure:
        slices = SequenceSlices(self.joint, slices_of(len(datum.rendered), self.group.count))
        own = slices.own

        def compute() -> Computed:
            with threads_for(self.base, own.stop - own.start), torch.set_grad_enabled(backward):
                scored = self._scored(datum, optimizer, slices, recomputation)
            results, ready = results_and_gradients([scored], [datum], [optimizer], backward)
            return results[0], ready

        log.info("computing tokens %d to %d of a sequence of %d tokens", own.start, own.stop - 1, slices.tokens)
        outcome = self.joint.attempt(compute)
        if isinstance(outcome, PassFailure) and outcome.out_of_memory and self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        return outcome

    def _scored(self, datum: DatumWork, optimizer: Optimizer, slices: SequenceSlices, recomputation: Recomputation) -> Scored:
        """Compute log-probabilities and losses of the whole sequence from the slices of all workers."""
        base, owner, own = self.base, optimizer.weights, slices.own
        row = pack([datum.rendered.part(own.start, own.stop)], [owner], base.device)
        plan = SequenceParallelPlan(slices, base.device, base.dtype)
        with kept_in_host_memory(len(row.token_ids)) if recomputation.offload else nullcontext():
            hidden = base.hidden_states(row, plan, recomputation.recompute)  # [own tokens, hidden]
        width = targets_per_position(datum)
        (loss,) = LossGroup.of([datum], [0], width)
        targets = upload(np.ascontiguousarray(datum.target_tokens.reshape(-1, width)[own]), base.device)
        wanted = trained_positions([loss])[own]
        keep = rows_to_keep(self.logits_chunk, base.dtype)
        logprobs: Tensor = target_logprobs(hidden, base.head(owner), targets, row.segments, self.logits_chunk, keep, wanted)
        return loss.computed(slices.whole(logprobs))  # [tokens, K]
