"""The work and results of a pass, datum by datum, grouped by loss."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.kernels.device import upload
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.losses import DatumSpans, Loss


@dataclass(frozen=True, eq=False)
class DatumWork:
    """One datum of one model, checked and ready to compute."""

    model_id: str
    rendered: RenderedInput
    target_tokens: NDArray[np.int64]
    """[N] or [N, K], N the length of `rendered`."""
    loss: Loss
    loss_inputs: Mapping[str, NDArray[np.float32]]
    """Inputs of the loss besides target_tokens, each of their shape."""


@dataclass(frozen=True, eq=False)
class DatumResult:
    """Result of a pass for one datum."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of the target tokens, in their shape."""
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the loss for the datum, by name."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Datums with the same loss and number K of targets a position, one behind the other."""

    places: list[int]
    """Indices of the datums in the row."""
    logprobs: Tensor
    """[positions, K] of their targets."""
    losses: Tensor
    """[positions, K] whose sum over the positions of a datum is its loss."""
    metrics: Tensor
    """[metrics of the loss, datums]"""


@dataclass(frozen=True, eq=False)
class LossGroup:
    """Datums with the same loss, K and kinds of inputs, one behind the other, still on the host."""

    loss: Loss
    places: list[int]
    """Indices of the datums in the row."""
    lengths: list[int]
    """Positions of each datum."""
    inputs: dict[str, NDArray[np.float32]]
    """[positions, K] each."""

    @classmethod
    def of(cls, work: Sequence[DatumWork], places: Sequence[int], width: int) -> list["LossGroup"]:
        """Group the datums at these places, which have `width` targets a position."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place in places:
            loss = work[place].loss
            alike.setdefault((loss.name, *sorted(loss.config.items()), *sorted(work[place].loss_inputs)), []).append(place)
        return [cls._of_alike([work[place] for place in own], own, width) for own in alike.values()]

    @classmethod
    def _of_alike(cls, datums: Sequence[DatumWork], places: list[int], width: int) -> "LossGroup":
        lengths = [len(datum.rendered) for datum in datums]
        inputs = {
            name: np.concatenate([datum.loss_inputs[name].reshape(len(datum.rendered), width) for datum in datums])
            for name in datums[0].loss_inputs
        }
        return cls(datums[0].loss, places, lengths, inputs)

    def computed(self, logprobs: Tensor) -> Scored:
        """Compute the losses of the group from its log-probabilities [positions, K]."""
        device = logprobs.device
        shape = logprobs.shape if logprobs.shape[1] > 1 else logprobs.shape[:1]  # losses over sequences have one target a position
        inputs = {name: upload(array, device).view(shape) for name, array in self.inputs.items()}
        spans = DatumSpans(self.lengths, device)
        flat = logprobs.view(shape)
        losses = self.loss.compute(flat, inputs, spans).view_as(logprobs)
        return Scored(self.places, logprobs, losses, self.loss.diagnose(flat.detach(), inputs, spans))


def trained_positions(groups: Sequence[LossGroup]) -> NDArray[np.bool_]:
    """The positions of neighbouring datums, all of these groups, that may have a gradient."""
    found: dict[int, NDArray[np.bool_]] = {}
    for group in groups:
        trained = group.loss.trains({name: torch.from_numpy(array) for name, array in group.inputs.items()}).any(-1)  # [positions]
        found |= dict(zip(group.places, np.split(trained.numpy(), np.cumsum(group.lengths)[:-1]), strict=True))
    return np.concatenate([found[place] for place in sorted(found)])


def results_of(
    group: Scored, work: Sequence[DatumWork], logprobs: NDArray[np.float32], losses: NDArray[np.float32], metrics: NDArray[np.float32]
) -> Iterator[DatumResult]:
    """Split the results of a group into those of its datums."""
    start = 0
    for place, of_datum in zip(group.places, metrics.T, strict=True):
        datum = work[place]
        own = slice(start, start + len(datum.rendered))
        loss = float(losses[own].sum(dtype=np.float64))
        named = dict(zip(datum.loss.metrics, of_datum.tolist(), strict=True))
        yield DatumResult(logprobs[own].reshape(datum.target_tokens.shape), loss, named)
        start = own.stop


def targets_per_position(datum: DatumWork) -> int:
    """The number K of targets of each position."""
    return datum.target_tokens.shape[1] if datum.target_tokens.ndim == 2 else 1
