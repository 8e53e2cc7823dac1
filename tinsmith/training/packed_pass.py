"""One pass: datums of any models in one packed row, to log-probabilities, losses and gradients.

Gradients come from `autograd.grad`. They are added to the accumulators last, when everything that can fail has succeeded, so a failed pass
leaves no trace. All work is given to the device before anything is read back from it. What is read back is known before the backward pass,
so a GPU may still be computing that pass when the next one is prepared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.models.base import BaseModel, PackedRow
from tinsmith.models.deterministic import instead
from tinsmith.models.device import Fetched, upload
from tinsmith.models.full import Weights
from tinsmith.models.pass_memory import KEEP_ALL, Effort
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.models.recompute import kept_in_host_memory
from tinsmith.rendering.packing import pack, packing_order, segments_of
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.compact import Optimizer
from tinsmith.training.datum_spans import DatumSpans
from tinsmith.training.logprobs import rows_to_keep, stable_target_logprobs, target_logprobs
from tinsmith.training.losses import Loss


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
    optimizers: Sequence[Optimizer],
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
    in_row, their_owners = [work[i] for i in order], [owners[i] for i in order]
    row = pack([datum.rendered for datum in in_row], their_owners, base.device)
    with torch.set_grad_enabled(backward):
        scored = _scored(base, row, in_row, their_owners, logits_chunk, effort)
    fetched = Fetched([tensor for group in scored for tensor in (group.logprobs, group.losses, group.metrics)])
    ready = _contributions([group.losses for group in scored], list(dict.fromkeys(optimizers))) if backward else []
    results: dict[int, DatumResult] = {}
    arrays = iter(fetched.arrived())  # of what lies before the backward pass, which a GPU may still be computing
    for group in scored:
        for place, result in zip(group.places, _results(group, in_row, next(arrays), next(arrays), next(arrays)), strict=True):
            results[order[place]] = result
    in_order = [results[i] for i in range(len(work))]
    for add in ready:  # from here on nothing allocates: all models get their gradients, or none does
        add()
    return in_order


@dataclass(frozen=True, eq=False)
class _Scored:
    """Datums that have the same loss and number K of targets a position, one behind the other."""

    places: list[int]
    """Of the datums in the row: 0 for the first."""
    logprobs: Tensor
    """[positions, K] of their targets."""
    losses: Tensor
    """[positions, K] whose sum over the positions of a datum is its loss."""
    metrics: Tensor
    """[metrics of the loss, datums]"""


def _scored(
    base: BaseModel, row: PackedRow, work: Sequence[DatumWork], owners: Sequence[Weights], chunk: int, effort: Effort
) -> list[_Scored]:
    """Log-probabilities and losses of all datums of the row.

    Neighbours with the same K are scored together, whichever model they belong to. No datum is padded to the K of another, which may be in
    the millions.
    """
    exact = None  # hidden states that depend on nothing but their own sequence
    if base.deterministic:
        with torch.no_grad():
            exact = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype, stable=True))
    plan = PackedPlan(row.lengths, base.device, base.dtype)
    with kept_in_host_memory(len(row.token_ids)) if effort.offload else nullcontext():
        hidden = exact if exact is not None and not torch.is_grad_enabled() else base.hidden_states(row, plan, effort.recompute)
    head = base.head(owners[0])  # [vocabulary, hidden]; a model with a head of its own is alone in the row
    keep = rows_to_keep(chunk, base.dtype)
    scored: list[_Scored] = []
    start = 0
    for width, group in groupby(range(len(work)), key=lambda place: _targets_per_position(work[place])):
        places = list(group)
        losses = _LossGroup.of(work, places, width)
        lengths = row.lengths[places[0] : places[-1] + 1]
        targets = upload(np.concatenate([work[place].target_tokens.reshape(-1, width) for place in places]), base.device)
        rows = hidden if len(targets) == len(hidden) else hidden[start : start + len(targets)]  # [group tokens, hidden]
        wanted = _trained(losses)  # [group tokens]
        segments = segments_of(lengths, [owners[place] for place in places])
        if exact is None or torch.is_grad_enabled():
            logprobs = target_logprobs(rows, head, targets, segments, chunk, keep, wanted)  # [group tokens, K]
        if exact is not None:
            values = stable_target_logprobs(exact[start : start + len(targets)], head, targets, segments, chunk)
            logprobs = instead(logprobs, values) if torch.is_grad_enabled() else values
        parts = dict(zip(places, logprobs.split(lengths), strict=True))
        for own in losses:
            together = logprobs if len(losses) == 1 else torch.cat([parts[place] for place in own.places])  # [positions, K]
            scored.append(own.computed(together))
        keep -= min(keep, int(wanted.sum()))
        start += len(targets)
    return scored


@dataclass(frozen=True, eq=False)
class _LossGroup:
    """Datums that have the same loss, K and kinds of inputs, and these inputs, one behind the other. Still on the host."""

    loss: Loss
    places: list[int]
    """Of the datums in the row: 0 for the first."""
    lengths: list[int]
    """Positions of each datum."""
    inputs: dict[str, NDArray[np.float32]]
    """[positions, K] each."""

    @classmethod
    def of(cls, work: Sequence[DatumWork], places: Sequence[int], width: int) -> list["_LossGroup"]:
        """The groups of the datums at these places, which have `width` targets a position."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place in places:
            loss = work[place].loss
            alike.setdefault((loss.name, *sorted(loss.config.items()), *sorted(work[place].loss_inputs)), []).append(place)
        return [cls._of_alike([work[place] for place in own], own, width) for own in alike.values()]

    @classmethod
    def _of_alike(cls, datums: Sequence[DatumWork], places: list[int], width: int) -> "_LossGroup":
        lengths = [len(datum.rendered) for datum in datums]
        inputs = {
            name: np.concatenate([datum.loss_inputs[name].reshape(len(datum.rendered), width) for datum in datums])
            for name in datums[0].loss_inputs
        }
        return cls(datums[0].loss, places, lengths, inputs)

    def computed(self, logprobs: Tensor) -> _Scored:
        """The losses of the group from its log-probabilities [positions, K]."""
        device = logprobs.device
        shape = logprobs.shape if logprobs.shape[1] > 1 else logprobs.shape[:1]  # losses over sequences have one target a position
        inputs = {name: upload(array, device).view(shape) for name, array in self.inputs.items()}
        spans = DatumSpans(self.lengths, device)
        flat = logprobs.view(shape)
        losses = self.loss.compute(flat, inputs, spans).view_as(logprobs)
        return _Scored(self.places, logprobs, losses, self.loss.diagnose(flat.detach(), inputs, spans))


def _trained(groups: Sequence[_LossGroup]) -> NDArray[np.bool_]:
    """Which positions of neighbouring datums, which these groups hold, may have a gradient."""
    found: dict[int, NDArray[np.bool_]] = {}
    for group in groups:
        trained = group.loss.trains({name: torch.from_numpy(array) for name, array in group.inputs.items()}).any(-1)  # [positions]
        found |= dict(zip(group.places, np.split(trained.numpy(), np.cumsum(group.lengths)[:-1]), strict=True))
    return np.concatenate([found[place] for place in sorted(found)])


def _results(
    group: _Scored, work: Sequence[DatumWork], logprobs: NDArray[np.float32], losses: NDArray[np.float32], metrics: NDArray[np.float32]
) -> Iterator[DatumResult]:
    """What the pass gives for the datums of a group."""
    start = 0
    for place, of_datum in zip(group.places, metrics.T, strict=True):
        datum = work[place]
        own = slice(start, start + len(datum.rendered))
        loss = float(losses[own].sum(dtype=np.float64))
        named = dict(zip(datum.loss.metrics, of_datum.tolist(), strict=True))
        yield DatumResult(logprobs[own].reshape(datum.target_tokens.shape), loss, named)
        start = own.stop


def _contributions(losses: Sequence[Tensor], optimizers: list[Optimizer]) -> list[Callable[[], None]]:
    """Functions that add the gradients of the sum of all `losses` to those that each model has accumulated."""
    leaves = [leaf for optimizer in optimizers for leaf in optimizer.weights.leaves()]
    ones = [torch.ones_like(of_positions) for of_positions in losses]
    gradients = iter(torch.autograd.grad(list(losses), leaves, ones, allow_unused=True))
    return [optimizer.contribution(list(islice(gradients, len(optimizer.weights.leaves())))) for optimizer in optimizers]


def _targets_per_position(datum: DatumWork) -> int:
    return datum.target_tokens.shape[1] if datum.target_tokens.ndim == 2 else 1
