"""One pass: datums of any models in one packed row, to log-probabilities, losses and gradients.

Gradients come from `autograd.grad`. They are added to the accumulators last, when everything that can fail has succeeded, so a failed pass
leaves no trace.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.full import Weights
from tinsmith.models.pass_memory import KEEP_ALL, Effort
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.models.recompute import kept_in_host_memory
from tinsmith.rendering.packing import pack, packing_order, segments_of
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.logprobs import rows_to_keep, target_logprobs
from tinsmith.training.losses import Loss
from tinsmith.training.optimizer import ModelOptimizer


@dataclass(frozen=True, eq=False)
class DatumWork:
    """One datum of one model, checked and ready to compute."""

    model_id: str
    rendered: RenderedInput
    target_tokens: NDArray[np.int64]
    """[N] or [N, K], N the length of `rendered`."""
    loss: Loss
    loss_inputs: Mapping[str, NDArray[np.float32]]
    """What the loss reads besides target_tokens, each of the shape of `target_tokens`."""


@dataclass(frozen=True, eq=False)
class DatumResult:
    """What a pass gives for one datum."""

    logprobs: NDArray[np.float32]
    """Of the target tokens, in their shape."""
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the loss says of the datum beside its value, by name."""


def run_packed(
    base: BaseModel,
    work: Sequence[DatumWork],
    optimizers: Sequence[ModelOptimizer],
    backward: bool,
    logits_chunk: int,
    effort: Effort = KEEP_ALL,
) -> list[DatumResult]:
    """Compute datums in one row; with `backward` each model's gradients go to its optimizer.

    `optimizers` are those of the models of each datum, which share a row (`packing.shared_rows`). Logits exist for `logits_chunk` tokens
    at a time. `effort` changes the memory that the pass takes, and no result. Raises whatever torch raises, before any gradient is added.
    """
    owners = [optimizer.weights for optimizer in optimizers]
    order = packing_order([len(datum.rendered) for datum in work], owners)
    row = pack([work[i].rendered for i in order], [owners[i] for i in order], base.device)
    with torch.set_grad_enabled(backward):
        parts = _logprobs(base, row, [work[i] for i in order], [owners[i] for i in order], logits_chunk, effort)
        losses = [work[i].loss.compute(part, _inputs(work[i], base.device)) for i, part in zip(order, parts, strict=True)]
        per_datum = torch.stack(losses)  # [datums]
    metrics = _metrics([work[i] for i in order], parts)
    ready = _contributions(per_datum.sum(), list(dict.fromkeys(optimizers))) if backward else []
    results: dict[int, DatumResult] = {}
    for i, logprobs, loss, of_datum in zip(order, _to_numpy(parts), per_datum.tolist(), metrics, strict=True):
        results[i] = DatumResult(logprobs, loss, of_datum)
    in_order = [results[i] for i in range(len(work))]
    for add in ready:  # from here on nothing allocates: all models get their gradients, or none does
        add()
    return in_order


def _logprobs(
    base: BaseModel, row: PackedRow, work: Sequence[DatumWork], owners: Sequence[Weights], chunk: int, effort: Effort
) -> list[Tensor]:
    """Log-probabilities of the targets of each datum of the row, in their shape.

    Neighbours with the same number K of targets a position are scored together, whichever model they belong to. No datum is padded to the
    K of another, which may be in the millions.
    """
    plan = PackedPlan(row.lengths, base.device, base.dtype)
    with kept_in_host_memory(len(row.token_ids)) if effort.offload else nullcontext():
        hidden = base.hidden_states(row, plan, effort.recompute)  # [tokens, hidden]
    head = base.head(owners[0])  # [vocabulary, hidden]; a model with a head of its own is alone in the row
    keep = rows_to_keep(chunk, base.dtype)
    parts: list[Tensor] = []
    start = 0
    for _, group in groupby(zip(work, owners, strict=True), key=lambda pair: _targets_per_position(pair[0])):
        datums, theirs = zip(*group, strict=True)
        lengths = [len(datum.rendered) for datum in datums]
        columns = np.concatenate([datum.target_tokens.reshape(len(datum.rendered), -1) for datum in datums])  # [group tokens, K]
        targets = torch.from_numpy(columns).to(base.device)
        rows = hidden if len(targets) == len(hidden) else hidden[start : start + len(targets)]  # [group tokens, hidden]
        wanted = np.concatenate([_trained(datum) for datum in datums])  # [group tokens]
        scored = target_logprobs(rows, head, targets, segments_of(lengths, theirs), chunk, keep, wanted)  # [group tokens, K]
        keep -= min(keep, int(wanted.sum()))
        parts += [part.view(datum.target_tokens.shape) for datum, part in zip(datums, scored.split(lengths), strict=True)]
        start += len(targets)
    return parts


def _metrics(work: Sequence[DatumWork], parts: Sequence[Tensor]) -> list[dict[str, float]]:
    """What the losses say of their datums, in one transfer. Most say nothing, and cost nothing."""
    said = [
        datum.loss.diagnose(part.detach(), _inputs(datum, part.device))
        for datum, part in zip(work, parts, strict=True)
        if datum.loss.metrics
    ]
    values = iter(torch.cat(said).tolist() if said else [])
    return [{name: next(values) for name in datum.loss.metrics} for datum in work]


def _inputs(datum: DatumWork, device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in datum.loss_inputs.items()}


def _contributions(loss: Tensor, optimizers: list[ModelOptimizer]) -> list[Callable[[], None]]:
    """Functions that add the gradients of `loss` to those that each model has accumulated."""
    leaves = [leaf for optimizer in optimizers for leaf in optimizer.weights.leaves()]
    gradients = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
    return [optimizer.contribution(list(islice(gradients, len(optimizer.weights.leaves())))) for optimizer in optimizers]


def _trained(datum: DatumWork) -> NDArray[np.bool_]:
    """Which positions [N] of a datum may have a gradient."""
    inputs = {name: torch.from_numpy(array) for name, array in datum.loss_inputs.items()}
    trained = datum.loss.trains(inputs).numpy().reshape(len(datum.rendered), -1)  # [N, K]
    found: NDArray[np.bool_] = np.asarray(trained.any(axis=1))
    return found


def _targets_per_position(datum: DatumWork) -> int:
    return datum.target_tokens.shape[1] if datum.target_tokens.ndim == 2 else 1


def _to_numpy(parts: Sequence[Tensor]) -> list[NDArray[np.float32]]:
    """All parts on the CPU, in one transfer."""
    flat = torch.cat([part.detach().flatten() for part in parts]).cpu()  # [numbers of all parts]
    cut = flat.split([part.numel() for part in parts])
    return [values.view(part.shape).numpy() for values, part in zip(cut, parts, strict=True)]
