"""Turns stored forward and forward_backward requests into checked datums."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.rendering.renderer import Measured, Renderer, check_token_ids, position_of
from tinsmith.store.records import RecordedSequence
from tinsmith.training.backend import DatumWork
from tinsmith.training.losses import CLIP_THRESHOLDS, COUNTED_BY, Loss, find_loss
from tinsmith.wire.forward_backward import Datum, ForwardBackwardRequest
from tinsmith.wire.tensors import ExpertIndices
from tinsmith.worker.provenance import sequence_ids, with_recorded

ROUTES = "rollout_expert_indices"
"""Key of the experts to follow."""

KNOWN_INPUTS = (
    *("target_tokens", "weights", "advantages", "logprobs", *CLIP_THRESHOLDS, "sequence_ratio_mask", "mask"),
    ROUTES,
)
"""loss_fn_inputs of the Tinker API, the "mask" of the cookbook's datums, which dro reads, and the experts to follow.

One that the loss does not read may ride along, unless it asks for something that the loss would then not do.
"""

_IGNORED = -100
"""The target of tokens that torch's cross_entropy leaves out."""

FloatArray = NDArray[np.float32]

FindRecorded = Callable[[Set[str]], Mapping[str, RecordedSequence]]
"""Ids of sampled sequences -> those that are recorded."""

FindRoutes = Callable[[str, Sequence[NDArray[np.int64]]], Sequence[ExpertIndices | None]]
"""(model id, sequences) -> the experts of the longest sampled sequence that each begins with, None if there is none."""


@dataclass(frozen=True, eq=False)
class CheckedDatum:
    """A checked datum with encoded images: decoded, pixel values would take a hundred times the memory."""

    model_id: str
    measured: Measured
    targets: NDArray[np.int64]
    """[n] or [n, k]"""
    loss: Loss
    inputs: dict[str, FloatArray]
    """Inputs of the loss, each of the shape of `targets`."""
    renderer: Renderer
    routes: ExpertIndices | None = None
    """Experts of its first tokens to follow; the router chooses those of the others."""

    def __len__(self) -> int:
        return len(self.measured)

    @property
    def undecoded(self) -> dict[bytes, int]:
        return self.renderer.undecoded(self.measured)

    def work(self) -> DatumWork:
        """Render the datum. Raises UserError if an image is broken."""
        rendered = self.renderer.render_measured(self.measured)
        replayed = None
        if self.renderer.base.follows_experts and self.loss.compares:
            replayed = 0.0 if self.routes is None else self.routes.shape[1] / len(rendered)
        if self.routes is not None:
            rendered = replace(rendered, routes=_to_length(self.routes, len(rendered)))
        return DatumWork(self.model_id, rendered, self.targets, self.loss, self.inputs, replayed)


def _to_length(routes: ExpertIndices, tokens: int) -> NDArray[np.int16]:
    """Lengthen the experts of the first tokens by -1, with which the router chooses: [mixtures, tokens, per_token]."""
    whole = np.full((routes.shape[0], tokens, routes.shape[2]), -1, dtype=np.int16)
    whole[:, : routes.shape[1]] = routes
    return whole


def prepare(
    model_id: str,
    request: ForwardBackwardRequest,
    renderer: Renderer,
    find_recorded: FindRecorded,
    find_routes: FindRoutes | None = None,
) -> list[CheckedDatum]:
    """Check every datum before any image is decoded. Raises UserError naming datum, field and value.

    A loss that compares with the sampler's log-probabilities follows the experts that `find_routes` finds.
    """
    loss = find_loss(request.loss_fn, request.loss_fn_config)
    if not request.data:
        raise UserError("data is empty; send at least one datum")
    recorded = find_recorded(sequence_ids(request.data, model_id)) if loss.needs_provenance else {}
    prepared = []
    for index, datum in enumerate(request.data):
        try:
            prepared.append(_prepare_datum(model_id, datum, loss, renderer, recorded))
        except TinsmithError as error:
            raise type(error)(f"datum {index}: {error}") from error
    if find_routes is None or not loss.compares or not renderer.base.follows_experts:
        return prepared
    return _with_found(model_id, prepared, find_routes)


def _with_found(model_id: str, prepared: Sequence[CheckedDatum], find_routes: FindRoutes) -> list[CheckedDatum]:
    """Follow the experts of sampled sequences that datums contain to their last token, but where a datum brings some.

    A sampled sequence ends with the target of the last token that was computed.
    """
    sequences = [np.append(datum.measured.identity, datum.targets[-1]) for datum in prepared]
    return [
        replace(datum, routes=routes) if datum.routes is None else datum
        for datum, routes in zip(prepared, find_routes(model_id, sequences), strict=True)
    ]


def check_lengths(datums: Sequence[CheckedDatum], longest: int, workers: int) -> None:
    """Raise UserError for a datum of more than `longest` tokens, the most that `workers` workers have memory for."""
    device = (
        "this server's device trains"
        if workers == 1
        else f"the devices of this server's {workers} workers trains together"
    )
    for index, datum in enumerate(datums):
        if len(datum) > longest:
            raise UserError(
                f"datum {index}: the model input holds {len(datum)} tokens, and the memory of {device} up to "
                f"{longest}; "
                "send a shorter one, or start the server with a smaller cache (--kv-cache-gib)"
            )


def _prepare_datum(
    model_id: str, datum: Datum, loss: Loss, renderer: Renderer, recorded: Mapping[str, RecordedSequence]
) -> CheckedDatum:
    for name in datum.loss_fn_inputs:
        if name not in KNOWN_INPUTS:
            raise UserError(f"loss_fn_inputs has an unknown key {name!r}; known are {', '.join(KNOWN_INPUTS)}")
    measured = renderer.measure(datum.chunks)
    targets = _targets(datum, loss, len(measured), renderer.base.vocab_size)
    if loss.needs_provenance:
        datum = with_recorded(datum, measured.tokens, targets, model_id, recorded)
    optional = [name for name in loss.optional_inputs if name in datum.loss_fn_inputs]
    inputs = {name: _loss_input(datum, loss, name, targets.shape) for name in (*loss.inputs, *optional)}
    _check_thresholds(datum, loss, inputs)
    _check_counted(loss, inputs)
    _check_unread(datum, loss, inputs)
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise UserError(
            f"sequence_ratio_mask is 0 everywhere; {loss.name} takes the sequence's ratio over the "
            "positions where it is not 0"
        )
    routes = _routes(datum, len(measured), renderer.base) if ROUTES in datum.loss_fn_inputs else None
    return CheckedDatum(model_id, measured, targets, loss, inputs, renderer, routes)


def _routes(datum: Datum, length: int, base: BaseModel) -> NDArray[np.int16]:
    """Return the experts that a datum brings as [mixtures, tokens, per_token]."""
    values, kind = datum.loss_fn_inputs[ROUTES], base.layout.mixture
    if kind is None or not base.follows_experts:
        raise UserError(f"{ROUTES} is given, but {base.name} has no experts that can be chosen; leave it out")
    if values.dtype != np.int64:
        raise UserError(f"{ROUTES} is {values.dtype}; send numbers of experts as int64")
    wanted = len(base.layout.experts), kind.per_token
    if values.ndim != 3 or values.shape[1:] != wanted or not 0 < len(values) <= length:
        raise UserError(
            f"{ROUTES} has shape {values.shape}; send the experts of the first tokens of the model input, at most "
            f"({length}, {wanted[0]}, {wanted[1]}): tokens, layers with experts, experts of a token"
        )
    wrong = np.flatnonzero((values < 0) | (values >= kind.count))
    if wrong.size:
        raise UserError(
            f"{ROUTES} at position {position_of(wrong[0], values.shape)} is {values.flat[wrong[0]]}; "
            f"send numbers in [0, {kind.count})"
        )
    ordered = np.sort(values, axis=-1)
    twice = np.flatnonzero((ordered[..., 1:] == ordered[..., :-1]).any(-1))
    if twice.size:
        place = position_of(twice[0], values.shape[:2])
        raise UserError(f"{ROUTES} at position {place} is {values[place].tolist()}; send each expert of a token once")
    return values.swapaxes(0, 1).astype(np.int16)


def _targets(datum: Datum, loss: Loss, length: int, vocab_size: int) -> NDArray[np.int64]:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise UserError("loss_fn_inputs has no target_tokens; send one for every position of the model input")
    targets = datum.loss_fn_inputs["target_tokens"]
    if targets.dtype != np.int64:
        raise UserError(f"target_tokens is {targets.dtype}; send token ids as int64")
    if targets.ndim not in (1, 2) or targets.shape[0] != length or 0 in targets.shape:
        wanted = f"({length},) or ({length}, K)" if loss.many_targets else f"({length},)"
        raise UserError(
            f"target_tokens has shape {targets.shape}, but the model input has {length} positions: send {wanted}"
        )
    if targets.ndim == 2 and not loss.many_targets:
        raise UserError(
            f"target_tokens has shape {targets.shape}, but {loss.name} takes one target a position: send ({length},)"
        )
    ignored = np.flatnonzero(targets == _IGNORED)
    if ignored.size:
        zero = "weights" if "weights" in loss.inputs else "advantages"
        raise UserError(
            f"target_tokens at position {position_of(ignored[0], targets.shape)} is {_IGNORED}, "
            f"with which other libraries leave a token out; send any token id there, and {zero} of 0"
        )
    check_token_ids(targets, vocab_size, "target_tokens")
    return targets.astype(np.int64, copy=False)


def _loss_input(datum: Datum, loss: Loss, name: str, shape: tuple[int, ...]) -> FloatArray:
    if name not in datum.loss_fn_inputs:
        if name == "weights":  # target_tokens alone means that every token counts once
            return np.ones(shape, dtype=np.float32)
        raise UserError(f"loss_fn_inputs has no {name}; {loss.name} needs {', '.join(('target_tokens', *loss.inputs))}")
    values = datum.loss_fn_inputs[name]
    if values.shape != shape:
        raise UserError(f"{name} has shape {values.shape}, target_tokens has {shape}; they must be equal")
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise UserError(
            f"{name} at position {position_of(wrong[0], shape)} is {values.flat[wrong[0]]}; it must be finite"
        )
    return values.astype(np.float32)


def _check_thresholds(datum: Datum, loss: Loss, inputs: Mapping[str, FloatArray]) -> None:
    """Raise UserError for bounds of a loss that does not clip, or that leave no ratio."""
    brought = [name for name in CLIP_THRESHOLDS if name in datum.loss_fn_inputs]
    if not brought:
        return
    if not loss.clips:
        raise UserError(
            f"loss_fn_inputs has {brought[0]}, but {loss.name} does not clip; leave it out, or use ppo, cispo or gspo"
        )
    low, high = (inputs.get(name, np.full_like(inputs[brought[0]], loss.config[name])) for name in CLIP_THRESHOLDS)
    wrong = np.flatnonzero((low < 0) | (low > high))
    if wrong.size:
        first = wrong[0]
        bounds = f"clip_low_threshold={low[first]:g}, clip_high_threshold={high[first]:g}"
        raise UserError(
            f"the bounds at position {first} are {bounds}; they must be at least 0, "
            "and the low one not above the high one"
        )


def _check_counted(loss: Loss, inputs: Mapping[str, FloatArray]) -> None:
    """Refuse counting inputs other than 0 and 1: as factors they would be left out of the loss."""
    for name in COUNTED_BY:
        if name in loss.optional_inputs and name in inputs:
            wrong = np.flatnonzero((inputs[name] != 0) & (inputs[name] != 1))
            if wrong.size:
                raise UserError(
                    f"{name} at position {wrong[0]} is {inputs[name][wrong[0]]:g}, but {loss.name} only asks whether a "
                    "position counts: "
                    "send 1 for sampled tokens and 0 for others, and multiply the advantages by what weighs them"
                )


def _check_unread(datum: Datum, loss: Loss, inputs: Mapping[str, FloatArray]) -> None:
    """Raise UserError for weights and masks that the loss does not read, unless they are 1 wherever a target counts."""
    factor = "weights" if "weights" in loss.inputs else "advantages"
    for name in COUNTED_BY:
        if name in inputs or name not in datum.loss_fn_inputs:
            continue
        values = _loss_input(datum, loss, name, inputs[factor].shape)
        wrong = np.flatnonzero((values != 1) & (inputs[factor] != 0))
        if wrong.size:
            first = wrong[0]
            raise UserError(
                f"{name} at position {position_of(first, values.shape)} is {values.flat[first]:g} and {factor} is "
                f"{inputs[factor].flat[first]:g}, but {loss.name} has no {name}; "
                f"multiply the {factor} by them and leave them out"
            )
