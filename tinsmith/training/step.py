"""The training step, from datums to gradients; the optimizer's step that ends it is `ModelOptimizer.step`.

    render       text and images to token ids and pixels, in threads       rendering/renderer.py
    pack         datums of any models into one row                         rendering/packing.py
    forward      hidden states, then log-probabilities of the targets      models/decoder.py, logprobs.py
    loss         of each datum                                             losses.py
    backward     gradients of all models, with `autograd.grad`
    accumulate   in place, when everything that can fail has succeeded     optimizer.py
    step         AdamW on what was accumulated, model by model             optimizer.py

A failed pass leaves no trace. All work is given to the device before anything is read back, and what is read back is
known before the backward: a GPU may still be computing that when the next pass is prepared.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.device import Fetched, upload
from tinsmith.memory.pass_memory import KEEP_ALL, Recomputation
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.decoder import kept_in_host_memory
from tinsmith.models.deterministic import instead
from tinsmith.models.full import Weights
from tinsmith.rendering.packing import pack, packing_order, segments_of
from tinsmith.training.captured_pass import CapturedPasses
from tinsmith.training.compact import Optimizer
from tinsmith.training.logprobs import rows_to_keep, stable_target_logprobs, target_logprobs
from tinsmith.training.losses import (
    DatumResult,
    DatumWork,
    LossGroup,
    Scored,
    results_of,
    targets_per_position,
    trained_positions,
)


def run_packed(
    base: BaseModel,
    work: Sequence[DatumWork],
    optimizers: Sequence[Optimizer],
    backward: bool,
    logits_chunk: int,
    recomputation: Recomputation = KEEP_ALL,
    look: Callable[[], None] | None = None,
    captured: CapturedPasses | None = None,
) -> list[DatumResult]:
    """Compute datums in one row; with `backward` each model's gradients go to its optimizer.

    `optimizers` are those of the datums' models, which share a row (`packing.shared_rows`). Logits exist for
    `logits_chunk` tokens at a time. `look` is called between layers; `captured` computes what it has a graph for.
    Raises before any gradient is added.
    """
    order = packing_order([len(datum.rendered) for datum in work], [optimizer.weights for optimizer in optimizers])
    in_row, owners = [work[i] for i in order], [optimizers[i].weights for i in order]
    row = pack([datum.rendered for datum in in_row], owners, base.device)
    with torch.set_grad_enabled(backward):
        # Hidden states have no name here, so that the backward finds their memory free.
        scored = _losses(base, row, in_row, owners, logits_chunk, *_forward(base, row, recomputation, look, captured))
    of_row, ready = results_and_gradients(scored, in_row, list(dict.fromkeys(optimizers)), backward)
    results = {order[place]: result for place, result in of_row.items()}
    in_order = [results[i] for i in range(len(work))]
    for add in ready:  # from here on nothing allocates: all models get their gradients, or none does
        add()
    return in_order


def _forward(
    base: BaseModel,
    row: PackedRow,
    recomputation: Recomputation,
    look: Callable[[], None] | None,
    captured: CapturedPasses | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute final hidden states [tokens, hidden]; --deterministic adds some that depend on their sequence alone."""
    exact = hidden = None
    if base.deterministic:
        with torch.no_grad():
            exact = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype, True, row.routes))
    if not torch.is_grad_enabled():
        hidden = exact
    elif captured is not None and recomputation == KEEP_ALL:
        hidden = captured.hidden_states(row)
    if hidden is None:
        plan = PackedPlan(row.lengths, base.device, base.dtype, routes=row.routes)
        with kept_in_host_memory(len(row.token_ids)) if recomputation.offload else nullcontext():
            hidden = base.hidden_states(
                row, plan, recomputation.recompute, None if look is None else lambda layer: look()
            )
    return hidden, exact


def _losses(
    base: BaseModel,
    row: PackedRow,
    work: Sequence[DatumWork],
    owners: Sequence[Weights],
    chunk: int,
    hidden: Tensor,
    exact: Tensor | None,
) -> list[Scored]:
    """Compute log-probabilities and losses of all datums of the row.

    Neighbours with the same K are scored together, of whichever model: no datum is padded to the K of another.
    """
    head = base.head(owners[0])  # [vocabulary, hidden]; a model with a head of its own is alone in the row
    keep = rows_to_keep(chunk, base.dtype)
    scored: list[Scored] = []
    start = 0
    for width, group in groupby(range(len(work)), key=lambda place: targets_per_position(work[place])):
        places = list(group)
        losses = LossGroup.of(work, places, width)
        lengths = row.lengths[places[0] : places[-1] + 1]
        target_tokens = np.concatenate([work[place].target_tokens.reshape(-1, width) for place in places])
        targets = upload(target_tokens, base.device)  # [group tokens, K]
        rows = hidden if len(targets) == len(hidden) else hidden[start : start + len(targets)]  # [group tokens, hidden]
        wanted = trained_positions(losses)  # [group tokens]
        segments = segments_of(lengths, [owners[place] for place in places])
        if exact is None or torch.is_grad_enabled():
            logprobs = target_logprobs(rows, head, targets, segments, chunk, keep, wanted)  # [group tokens, K]
        if exact is not None:
            values = stable_target_logprobs(exact[start : start + len(targets)], head, targets, segments, chunk)
            logprobs = instead(logprobs, values) if torch.is_grad_enabled() else values
        parts = dict(zip(places, logprobs.split(lengths), strict=True))
        for own in losses:
            # [positions, K]
            together = logprobs if len(losses) == 1 else torch.cat([parts[place] for place in own.places])
            scored.append(own.computed(together))
        keep -= min(keep, int(wanted.sum()))
        start += len(targets)
    return scored


def results_and_gradients(
    scored: Sequence[Scored], work: Sequence[DatumWork], optimizers: list[Optimizer], backward: bool
) -> tuple[dict[int, DatumResult], list[Callable[[], None]]]:
    """Return results by datum index, and with `backward` functions that add the gradients of each model."""
    fetched = Fetched([tensor for group in scored for tensor in (group.logprobs, group.losses, group.metrics)])
    ready = _contributions([group.losses for group in scored], optimizers) if backward else []
    results: dict[int, DatumResult] = {}
    arrays = iter(fetched.arrived())
    for each in scored:
        own = results_of(each.group, work, next(arrays), next(arrays), next(arrays))
        results |= zip(each.group.places, own, strict=True)
    return results, ready


def _contributions(losses: Sequence[Tensor], optimizers: list[Optimizer]) -> list[Callable[[], None]]:
    """Compute the gradients of the sum of all `losses`; return functions that add them to each model's accumulator."""
    leaves = [leaf for optimizer in optimizers for leaf in optimizer.weights.leaves()]
    ones = [torch.ones_like(of_positions) for of_positions in losses]
    # Of two threads that launch kernels one always waits for Python's lock
    with torch.autograd.set_multithreading_enabled(False):
        gradients = iter(torch.autograd.grad(list(losses), leaves, ones, allow_unused=True))
    return [
        optimizer.accumulator.contribution(list(islice(gradients, len(optimizer.weights.leaves()))))
        for optimizer in optimizers
    ]
