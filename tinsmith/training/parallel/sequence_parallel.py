"""Computes one sequence on all workers together, because it is too long for one (sequence parallelism).

Each worker computes a slice of the tokens (`SequenceSlices`), and the loss of the whole sequence from the gathered
log-probabilities. Its backward takes the gradient of its own slice alone: a step, which sums over all workers, counts
every token once. Whatever fails, fails on all (`joint_work.py`).
"""

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.errors import TinsmithError
from tinsmith.kernels.device import upload
from tinsmith.memory.pass_memory import Recomputation, sliced_pass_memory_of
from tinsmith.memory.retries import Choice, MemoryRetries, PassFailure
from tinsmith.models.attention import PackedPlan, followed
from tinsmith.models.base import threads_for
from tinsmith.models.decoder import kept_in_host_memory
from tinsmith.models.delta_rule import convolve_anew
from tinsmith.protocol.work import error_of
from tinsmith.rendering.packing import pack
from tinsmith.training.compact import Optimizer
from tinsmith.training.logprobs import rows_to_keep, target_logprobs
from tinsmith.training.losses import DatumResult, DatumWork, LossGroup, Scored, targets_per_position, trained_positions
from tinsmith.training.model_memory import ModelMemory
from tinsmith.training.parallel.joint_work import JointWork
from tinsmith.training.parallel.process_group import ProcessGroup
from tinsmith.training.step import results_and_gradients

log = logging.getLogger(__name__)

# One sequence on several workers: slices of tokens become slices of heads and back (Ulysses, arXiv:2309.14509).
#
# What mixes tokens gets all tokens of some heads: an exchange gives each worker the heads that it computes, and another
# brings the results back to the tokens. The backward of the one is the other.


@dataclass(frozen=True)
class HeadShares:
    """Heads of each worker, where groups of heads share one of another kind: queries share keys and values."""

    heads: tuple[slice, ...]
    """Heads of each worker, perhaps none. They cover all heads."""
    shared: tuple[slice, ...]
    """Shared heads of each worker. Several workers may have the same."""
    places: tuple[tuple[int, ...] | None, ...]
    """For each of a worker's heads the place of its shared one; None where each is shared by equal groups in order."""


@lru_cache(maxsize=64)
def share_heads(heads: int, shared: int, count: int) -> HeadShares:
    """Divide `heads` heads, of which equal groups share each of `shared` others, among `count` workers.

    Whole groups where there are enough, or else heads, as evenly as possible.
    """
    group = heads // shared
    unit = group if shared >= count else 1
    bounds = [unit * (heads // unit * rank // count) for rank in range(count + 1)]
    own = tuple(slice(*pair) for pair in pairwise(bounds))
    theirs = tuple(
        slice(part.start // group, -(-part.stop // group) if part.stop > part.start else part.start // group)
        for part in own
    )
    places = tuple(_places(part, part_shared, group) for part, part_shared in zip(own, theirs, strict=True))
    return HeadShares(own, theirs, places)


def _places(own: slice, shared: slice, group: int) -> tuple[int, ...] | None:
    places = tuple(head // group - shared.start for head in range(own.start, own.stop))
    each = len(places) // max(1, shared.stop - shared.start)
    even = tuple(place for place in range(shared.stop - shared.start) for _ in range(each))
    return None if places == even else places


def slices_of(tokens: int, count: int) -> tuple[slice, ...]:
    """The tokens of each of `count` workers, as evenly as it goes."""
    return tuple(slice(start, end) for start, end in pairwise(tokens * rank // count for rank in range(count + 1)))


@dataclass(frozen=True, eq=False)
class SequenceSlices:
    """The slices of one sequence, seen from one worker. To be used inside of `JointWork.attempt`."""

    joint: JointWork
    slices: tuple[slice, ...]

    @property
    def rank(self) -> int:
        return self.joint.group.place.rank

    @property
    def own(self) -> slice:
        return self.slices[self.rank]

    @property
    def tokens(self) -> int:
        tokens: int = self.slices[-1].stop
        return tokens

    def to_heads(self, *parts: tuple[Tensor, tuple[slice, ...]]) -> tuple[Tensor, ...]:
        """Exchange x [own tokens, heads, ...] for [tokens, own heads, ...], each with all workers' heads.

        Several at once, so that the backward brings all back, also those that a worker without heads does not use.
        """
        compute: Any = _ToHeads.apply
        out: tuple[Tensor, ...] = compute(self, tuple(heads for _, heads in parts), *(x for x, _ in parts))
        return out

    def to_tokens(self, y: Tensor, heads: tuple[slice, ...], count: int) -> Tensor:
        """Exchange y [tokens, own heads, ...] for [own tokens, heads, ...] with all `count` heads."""
        compute: Any = _ToTokens.apply
        out: Tensor = compute(y, self, heads, count)
        return out

    def after_the_last(self, x: Tensor, history: int) -> Tensor:
        """Put the last `history` tokens of the worker before in front of this one's, zeros for the first.

        x [own tokens, channels] -> [history + own tokens, channels]. No worker may have fewer than `history` tokens.
        """
        compute: Any = _AfterTheLast.apply
        out: Tensor = compute(x, self, history)
        return out

    def whole(self, x: Tensor) -> Tensor:
        """Gather x [own tokens, ...] of all workers to [tokens, ...], with the same bits everywhere.

        Each worker must compute the same of it: its backward takes what belongs to its own tokens alone.
        """
        compute: Any = _Whole.apply
        out: Tensor = compute(x, self)
        return out

    # ---- Without gradients

    def scatter_heads(self, x: Tensor, heads: tuple[slice, ...]) -> Tensor:
        """Exchange as `to_heads` does. A head that several workers have goes to each of them."""
        rest, mine = x.shape[2:], _length(heads[self.rank])
        width = math.prod(rest)
        sizes = [x.shape[0] * _length(part) * width for part in heads]
        sent = x.new_empty(sum(sizes))
        for part, piece in zip(heads, sent.split(sizes), strict=True):
            piece.view(x.shape[0], _length(part), *rest).copy_(x[:, part])
        received = self.joint.all_to_all(sent, sizes, [_length(tokens) * mine * width for tokens in self.slices])
        return received.view(self.tokens, mine, *rest)

    def collect_heads(self, y: Tensor, heads: tuple[slice, ...], count: int) -> Tensor:
        """Exchange as `to_tokens` does. Values that several workers have of one head are summed."""
        rest, mine = y.shape[2:], _length(heads[self.rank])
        own, width = _length(self.own), math.prod(rest)
        sizes = [own * _length(part) * width for part in heads]
        received = self.joint.all_to_all(
            y.reshape(-1), [_length(tokens) * mine * width for tokens in self.slices], sizes
        )
        pieces = [
            piece.view(own, _length(part), *rest) for part, piece in zip(heads, received.split(sizes), strict=True)
        ]
        if sum(map(_length, heads)) == count:
            return torch.cat(pieces, 1)
        out = y.new_zeros(own, count, *rest)
        for part, piece in zip(heads, pieces, strict=True):
            out[:, part] += piece
        return out

    def to_neighbour(self, x: Tensor, step: int) -> Tensor | None:
        """Give x [rows, channels] to the worker `step` ranks further; return what this one gets, None if nothing."""
        ranks = range(len(self.slices))
        to, giver = self.rank + step, self.rank - step
        size = x.numel()
        sent = x.reshape(-1) if to in ranks else x.new_empty(0)
        received = self.joint.all_to_all(
            sent, [size * (rank == to) for rank in ranks], [size * (rank == giver) for rank in ranks]
        )
        return received.view(x.shape) if giver in ranks else None


def _length(part: slice) -> int:
    return len(range(part.start, part.stop))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slices: SequenceSlices, heads: tuple[tuple[slice, ...], ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.slices, ctx.heads, ctx.counts = slices, heads, [x.shape[1] for x in tensors]
        return tuple(slices.scatter_heads(x, own) for x, own in zip(tensors, heads, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(grads, ctx.heads, ctx.counts, ctx.needs_input_grad[2:], strict=True)
        return (
            None,
            None,
            *(
                ctx.slices.collect_heads(grad, heads, count) if needed else None
                for grad, heads, count, needed in wanted
            ),
        )


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, slices: SequenceSlices, heads: tuple[slice, ...], count: int) -> Tensor:
        ctx.slices, ctx.heads = slices, heads
        return slices.collect_heads(y, heads, count)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.slices.scatter_heads(grads[0], ctx.heads), None, None, None


class _AfterTheLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: SequenceSlices, history: int) -> Tensor:
        ctx.slices, ctx.history = slices, history
        before = slices.to_neighbour(x[len(x) - history :], 1)
        return torch.cat([x.new_zeros(history, x.shape[1]) if before is None else before, x])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        history = ctx.history
        of_others, own = grads[0].split([history, len(grads[0]) - history])
        back = ctx.slices.to_neighbour(of_others, -1)
        if back is None:
            return own, None, None
        found = own.clone()
        found[len(found) - history :] += back
        return found, None, None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: SequenceSlices) -> Tensor:
        ctx.own = slices.own
        found = x.new_zeros(slices.tokens, *x.shape[1:])
        found[slices.own] = x
        slices.joint.all_reduce(found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None


class SequenceParallelPlan:
    """`PassPlan` of a slice of one sequence: exchanges heads for attention and delta rules, tokens for convolutions."""

    def __init__(
        self, slices: SequenceSlices, device: torch.device, dtype: torch.dtype, routes: Tensor | None = None
    ) -> None:
        """`routes` are those of the own tokens, as in `PackedPlan`."""
        self.slices = slices
        self.routes = routes
        self.whole = PackedPlan([slices.tokens], device, dtype)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        heads = query.shape[1]
        shares = self._shares(heads, key.shape[1])
        query, key, value = self.slices.to_heads((query, shares.heads), (key, shares.shared), (value, shares.shared))
        key, value = self._matched(key, shares), self._matched(value, shares)
        own = None if sinks is None else sinks[shares.heads[self.slices.rank]]
        out = query if query.shape[1] == 0 else self.whole.attend(layer, query, key, value, scale, window, own)
        return self.slices.to_tokens(out, shares.heads, heads)

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        history = weight.shape[1] - 1
        longer = self.slices.after_the_last(x, history)
        return convolve_anew(longer, weight, (len(longer),))[history:]

    def delta_rule(self, layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        heads = value.shape[1]
        shares = self._shares(heads, key.shape[1])
        of_keys, of_values = (
            ((x, shares.shared) for x in (query, key)),
            ((x, shares.heads) for x in (value, decay, beta)),
        )
        query, key, value, decay, beta = self.slices.to_heads(*of_keys, *of_values)
        query, key = self._matched(query, shares), self._matched(key, shares)
        out = value if value.shape[1] == 0 else self.whole.delta_rule(layer, query, key, value, decay, beta)
        return self.slices.to_tokens(out, shares.heads, heads)

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        return chosen if self.routes is None else followed(self.routes[mixture], chosen)

    def _shares(self, heads: int, shared: int) -> HeadShares:
        return share_heads(heads, shared, len(self.slices.slices))

    def _matched(self, x: Tensor, shares: HeadShares) -> Tensor:
        """Repeat shared heads [tokens, heads, width] for the heads that share them, if these are not equal groups."""
        places = shares.places[self.slices.rank]
        return x if places is None else x[:, list(places)]


# The pass over such a sequence, and which of its failures concern all workers.

SHORTEST_SLICE = 16
"""Fewest tokens of a worker: more than a convolution reaches back."""

Computed = tuple[DatumResult, list[Callable[[], None]]]
"""The result of a sequence, and what adds its gradients."""


class SequenceParallel:
    """Sequences that all workers of a group compute together."""

    def __init__(self, logits_chunk: int, group: ProcessGroup, models: ModelMemory) -> None:
        self.base = base = models.base
        self.logits_chunk = logits_chunk
        self.group = group
        self.models = models
        self.joint = JointWork(group)
        memory = sliced_pass_memory_of(base.layout, base.text_config, base.dtype, group.count)
        self.memory_retries = MemoryRetries(memory, base.device, logits_chunk, models.promised, agree=self._most_of_all)

    def run(self, number: int, work: DatumWork | TinsmithError, backward: bool) -> DatumResult:
        """Compute one datum as the pass `number`; with `backward` its gradients go to the optimizer of its model.

        `work` may be why this worker cannot compute it. Raises the same error on all workers if one cannot, and
        DeviceLostError if they are not at the same pass.
        """
        self.group.agree(number, "the pass that comes next")
        ready = self.joint.attempt(lambda: self._ready(work))
        if isinstance(ready, PassFailure):
            raise error_of(ready.error_type, ready.reason)
        datum, optimizer = ready
        tokens = -(-len(datum.rendered) // self.group.count)
        attempt = partial(self._attempt, datum, optimizer, backward)
        outcome = self.memory_retries.run(attempt, tokens, backward, alone=True)
        while isinstance(outcome, PassFailure) and outcome.out_of_memory and self._others_leave(optimizer):
            outcome = self.memory_retries.run(attempt, tokens, backward, alone=True)
        if isinstance(outcome, PassFailure):
            needs = (
                f"a sequence of {len(datum.rendered)} tokens needs more memory than {self.group.count} workers "
                "together have left: "
            )
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
            raise TinsmithError(
                f"a sequence of {len(work.rendered)} tokens is too short to be divided among {self.group.count} workers"
            )
        optimizer = self.models.optimizers[work.model_id]
        self.models.pager.bring([optimizer])
        return work, optimizer

    def _others_leave(self, optimizer: Optimizer) -> bool:
        """Page out all other models on all workers; returns whether one had any that its host memory has taken."""
        return any(self.group.gather(self.models.pager.leave_only([optimizer])))

    def _most_of_all(self, choose: Choice) -> Recomputation | None:
        """Return the most that any worker chooses, as recomputing exchanges again; None if one has no choice left."""
        own = self.joint.attempt(choose)
        if isinstance(own, PassFailure):
            raise error_of(own.error_type, own.reason)
        chosen = self.group.gather(-1 if own is None else 2 * own.recompute + own.offload)
        return None if min(chosen) < 0 else Recomputation(max(chosen) // 2, max(chosen) % 2 == 1)

    def _attempt(
        self, datum: DatumWork, optimizer: Optimizer, backward: bool, recomputation: Recomputation
    ) -> Computed | PassFailure:
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

    def _scored(
        self, datum: DatumWork, optimizer: Optimizer, slices: SequenceSlices, recomputation: Recomputation
    ) -> Scored:
        """Compute log-probabilities and losses of the whole sequence from the slices of all workers."""
        base, owner, own = self.base, optimizer.weights, slices.own
        row = pack([datum.rendered.part(own.start, own.stop)], [owner], base.device)
        plan = SequenceParallelPlan(slices, base.device, base.dtype, row.routes)
        with kept_in_host_memory(len(row.token_ids)) if recomputation.offload else nullcontext():
            hidden = base.hidden_states(row, plan, recomputation.recompute)  # [own tokens, hidden]
        width = targets_per_position(datum)
        (loss,) = LossGroup.of([datum], [0], width)
        targets = upload(np.ascontiguousarray(datum.target_tokens.reshape(-1, width)[own]), base.device)
        wanted = trained_positions([loss])[own]
        keep = rows_to_keep(self.logits_chunk, base.dtype)
        logprobs: Tensor = target_logprobs(
            hidden, base.head(owner), targets, row.segments, self.logits_chunk, keep, wanted
        )
        return loss.computed(slices.whole(logprobs))  # [tokens, K]
