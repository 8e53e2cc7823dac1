"""Computes one sequence on all workers together, because it is too long for one (sequence parallelism).

Each worker computes a slice of the tokens. Where tokens meet, slices of tokens become slices of heads (`sequence_slices.py`). Every worker
computes the loss of the whole sequence from the gathered log-probabilities, and in its backward takes up the gradient of its own slice
alone: a step, which sums over all workers, counts every token once.

Whatever fails, fails on all: no worker adds gradients before all have theirs (`distributed/joint_work.py`).
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from tinsmith.distributed.joint_work import JointFailure, JointWork
from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import TinsmithError
from tinsmith.kernels.device import upload
from tinsmith.memory.pass_memory import KEEP_ALL, Recomputation, sliced_pass_memory_of
from tinsmith.memory.retries import MemoryRetries, is_out_of_memory
from tinsmith.models.base import BaseModel
from tinsmith.models.recompute import kept_in_host_memory
from tinsmith.models.threads import threads_for
from tinsmith.protocol.work import error_of
from tinsmith.rendering.packing import pack
from tinsmith.training.compact import Optimizer
from tinsmith.training.logprobs import rows_to_keep, target_logprobs
from tinsmith.training.loss_groups import DatumResult, DatumWork, LossGroup, Scored, targets_per_position, trained_positions
from tinsmith.training.parallel.sequence_slices import SequenceSlices, SlicedPlan, slices_of
from tinsmith.training.step import results_and_gradients

log = logging.getLogger(__name__)

SHORTEST_SLICE = 16
"""Fewest tokens of a worker: more than a convolution reaches back."""

Computed = tuple[DatumResult, list[Callable[[], None]]]
"""The result of a sequence, and what adds its gradients."""


class SequenceParallel:
    """Sequences that all workers of a group compute together. `promised` returns free bytes of the device that others will still take."""

    def __init__(self, base: BaseModel, logits_chunk: int, group: ProcessGroup, promised: Callable[[], int]) -> None:
        self.base = base
        self.logits_chunk = logits_chunk
        self.group = group
        self.joint = JointWork(group, is_out_of_memory)
        memory = sliced_pass_memory_of(base.layout, base.text_config, base.dtype, group.count)
        self.memory_retries = MemoryRetries(memory, base.device, logits_chunk, promised)

    def run(self, number: int, work: DatumWork | TinsmithError, backward: bool, find: Callable[[str], Optimizer]) -> DatumResult:
        """Compute one datum, which is the pass `number`; with `backward` its gradients go to the optimizer of its model.

        `work` may be why this worker cannot compute it. Raises the same error on all workers if one cannot, and DeviceLostError if they are
        not at the same pass.
        """
        self.group.agree(number, "the pass that comes next")
        ready = self.joint.attempt(lambda: _ready(work, find, self.group.count))
        if isinstance(ready, JointFailure):
            raise error_of(ready.error_type, ready.reason)
        datum, optimizer = ready
        tokens = -(-len(datum.rendered) // self.group.count)
        recomputation = self._agreed(lambda: self.memory_retries.first(tokens, backward)) or KEEP_ALL
        while True:
            outcome = self._attempt(datum, optimizer, backward, recomputation)
            if not isinstance(outcome, JointFailure):
                result, ready_to_add = outcome
                for add in ready_to_add:  # from here on nothing allocates, on no worker
                    add()
                self.memory_retries.succeeded()
                return result
            if not outcome.out_of_memory:
                raise TinsmithError(f"the pass failed: {outcome.reason}")
            more = self._more(recomputation, tokens, backward)
            if more is None:
                needs = f"a sequence of {len(datum.rendered)} tokens needs more memory than {self.group.count} workers together have left"
                raise TinsmithError(f"the pass failed: {needs}: {outcome.reason}")
            recomputation = more

    # ---- Memory

    def _more(self, recomputation: Recomputation, tokens: int, backward: bool) -> Recomputation | None:
        """Return the recomputation to try after an out-of-memory on any worker; None if nothing helps."""
        if self.base.device.type == "cuda":
            torch.cuda.empty_cache()
        if not backward:
            return None
        more = self._agreed(lambda: self.memory_retries.more(recomputation, tokens, alone=True))
        if more is not None:
            log.warning("out of memory in %d tokens of a sequence of all workers: they recompute %d layers", tokens, more.recompute)
        return more

    def _agreed(self, choose: Callable[[], Recomputation | None]) -> Recomputation | None:
        """Return the most that any worker chooses, because what is computed again exchanges again; None if one has nothing to choose."""
        own = self.joint.attempt(choose)
        if isinstance(own, JointFailure):
            raise error_of(own.error_type, own.reason)
        chosen = self.group.gather(-1 if own is None else 2 * own.recompute + own.offload)
        return None if min(chosen) < 0 else Recomputation(max(chosen) // 2, max(chosen) % 2 == 1)

    # ---- Computing

    def _attempt(self, datum: DatumWork, optimizer: Optimizer, backward: bool, recomputation: Recomputation) -> Computed | JointFailure:
        slices = SequenceSlices(self.joint, slices_of(len(datum.rendered), self.group.count))
        own = slices.own

        def compute() -> Computed:
            with threads_for(self.base, own.stop - own.start), torch.set_grad_enabled(backward):
                scored = self._scored(datum, optimizer, slices, recomputation)
            results, ready = results_and_gradients([scored], [datum], [optimizer], backward)
            return results[0], ready

        log.info("computing tokens %d to %d of a sequence of %d tokens", own.start, own.stop - 1, slices.tokens)
        return self.joint.attempt(compute)

    def _scored(self, datum: DatumWork, optimizer: Optimizer, slices: SequenceSlices, recomputation: Recomputation) -> Scored:
        """Compute log-probabilities and losses of the whole sequence from the slices of all workers."""
        base, owner, own = self.base, optimizer.weights, slices.own
        row = pack([datum.rendered.part(own.start, own.stop)], [owner], base.device)
        plan = SlicedPlan(slices, base.device, base.dtype)
        with kept_in_host_memory(len(row.token_ids)) if recomputation.offload else nullcontext():
            hidden = base.hidden_states(row, plan, recomputation.recompute)  # [own tokens, hidden]
        width = targets_per_position(datum)
        (loss,) = LossGroup.of([datum], [0], width)
        targets = upload(np.ascontiguousarray(datum.target_tokens.reshape(-1, width)[own]), base.device)
        wanted = trained_positions([loss])[own]
        keep = rows_to_keep(self.logits_chunk, base.dtype)
        logprobs: Tensor = target_logprobs(hidden, base.head(owner), targets, row.segments, self.logits_chunk, keep, wanted)
        return loss.computed(slices.whole(logprobs))  # [tokens, K]


def _ready(work: DatumWork | TinsmithError, find: Callable[[str], Optimizer], count: int) -> tuple[DatumWork, Optimizer]:
    """Return the datum and the optimizer of its model. Raises what keeps this worker from computing it."""
    if isinstance(work, TinsmithError):
        raise work
    if len(work.rendered) < SHORTEST_SLICE * count:
        raise TinsmithError(f"a sequence of {len(work.rendered)} tokens is too short to be divided among {count} workers")
    return work, find(work.model_id)
