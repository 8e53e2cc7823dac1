"""A stored forward or forward_backward request -> datums that are checked and ready to compute."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError, UserError
from tinsmith.rendering.renderer import Renderer, check_token_ids, position_of
from tinsmith.training.backend import DatumWork
from tinsmith.training.losses import CLIP_THRESHOLDS, Loss, find_loss
from tinsmith.wire.forward_backward import Datum, ForwardBackwardRequest

KNOWN_INPUTS = ("target_tokens", "weights", "advantages", "logprobs", *CLIP_THRESHOLDS, "sequence_ratio_mask")
"""loss_fn_inputs of the Tinker API. One that the loss does not read may ride along, so that a datum of one loss can be scored with another,
unless it asks for something that the loss would then not do."""

FloatArray = NDArray[np.float32]


def prepare(model_id: str, request: ForwardBackwardRequest, renderer: Renderer) -> list[DatumWork]:
    """Check and render every datum. Raises UserError naming datum, field and value."""
    loss = find_loss(request.loss_fn, request.loss_fn_config)
    if not request.data:
        raise UserError("data is empty; send at least one datum")
    prepared = []
    for index, datum in enumerate(request.data):
        try:
            prepared.append(_prepare_datum(model_id, datum, loss, renderer))
        except TinsmithError as error:
            raise type(error)(f"datum {index}: {error}") from error
    return prepared


def _prepare_datum(model_id: str, datum: Datum, loss: Loss, renderer: Renderer) -> DatumWork:
    for name in datum.loss_fn_inputs:
        if name not in KNOWN_INPUTS:
            raise UserError(f"loss_fn_inputs has an unknown key {name!r}; known are {', '.join(KNOWN_INPUTS)}")
    rendered = renderer.render(datum.chunks)
    targets = _targets(datum, loss, len(rendered), renderer.base.vocab_size)
    optional = [name for name in loss.optional_inputs if name in datum.loss_fn_inputs]
    inputs = {name: _loss_input(datum, loss, name, targets.shape) for name in (*loss.inputs, *optional)}
    _check_thresholds(datum, loss, inputs)
    _check_weights(datum, loss, inputs)
    if "sequence_ratio_mask" in inputs and not inputs["sequence_ratio_mask"].any():
        raise UserError(f"sequence_ratio_mask is 0 everywhere; {loss.name} takes the sequence's ratio over the positions where it is not 0")
    return DatumWork(model_id, rendered, targets, loss, inputs)


def _targets(datum: Datum, loss: Loss, length: int, vocab_size: int) -> NDArray[np.int64]:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise UserError("loss_fn_inputs has no target_tokens; send one for every position of the model input")
    targets = datum.loss_fn_inputs["target_tokens"]
    if targets.dtype != np.int64:
        raise UserError(f"target_tokens is {targets.dtype}; send token ids as int64")
    if targets.ndim not in (1, 2) or targets.shape[0] != length or 0 in targets.shape:
        wanted = f"({length},) or ({length}, K)" if loss.many_targets else f"({length},)"
        raise UserError(f"target_tokens has shape {targets.shape}, but the model input has {length} positions: send {wanted}")
    if targets.ndim == 2 and not loss.many_targets:
        raise UserError(f"target_tokens has shape {targets.shape}, but {loss.name} takes one target a position: send ({length},)")
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
        raise UserError(f"{name} at position {position_of(wrong[0], shape)} is {values.flat[wrong[0]]}; it must be finite")
    return values.astype(np.float32)


def _check_thresholds(datum: Datum, loss: Loss, inputs: Mapping[str, FloatArray]) -> None:
    """Bounds for each position belong to a loss that clips, and leave it a ratio."""
    brought = [name for name in CLIP_THRESHOLDS if name in datum.loss_fn_inputs]
    if not brought:
        return
    if not loss.optional_inputs:
        raise UserError(f"loss_fn_inputs has {brought[0]}, but {loss.name} does not clip; leave it out, or use ppo, cispo or gspo")
    low, high = (inputs.get(name, np.full_like(inputs[brought[0]], loss.config[name])) for name in CLIP_THRESHOLDS)
    wrong = np.flatnonzero((low < 0) | (low > high))
    if wrong.size:
        first = wrong[0]
        bounds = f"clip_low_threshold={low[first]:g}, clip_high_threshold={high[first]:g}"
        raise UserError(f"the bounds at position {first} are {bounds}; they must be at least 0, and the low one not above the high one")


def _check_weights(datum: Datum, loss: Loss, inputs: Mapping[str, FloatArray]) -> None:
    """Weights beside advantages would be left out of the loss, so they may only say what the advantages say."""
    if "weights" in loss.inputs or "weights" not in datum.loss_fn_inputs:
        return
    advantages = inputs["advantages"]
    weights = _loss_input(datum, loss, "weights", advantages.shape)
    wrong = np.flatnonzero((weights != 1) & (advantages != 0))
    if wrong.size:
        first = wrong[0]
        raise UserError(
            f"weights at position {first} is {weights[first]:g} and advantages is {advantages[first]:g}, but {loss.name} has no weights; "
            "multiply the advantages by them and leave them out"
        )
