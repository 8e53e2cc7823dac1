"""A stored forward or forward_backward request -> datums that are checked and ready to compute."""

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError, UserError
from tinsmith.rendering.renderer import Renderer, check_token_ids
from tinsmith.training.backend import DatumWork
from tinsmith.training.losses import Loss, find_loss
from tinsmith.wire.forward_backward import Datum, ForwardBackwardRequest

KNOWN_INPUTS = (
    "target_tokens",
    "weights",
    "advantages",
    "logprobs",
    "clip_low_threshold",
    "clip_high_threshold",
    "sequence_ratio_mask",
)
"""loss_fn_inputs of the Tinker API. One that the loss does not read may ride along: a datum of one loss can be scored with another."""


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
    targets = _targets(datum, len(rendered), renderer.base.vocab_size)
    inputs = {name: _loss_input(datum, name, targets.shape) for name in loss.inputs}
    return DatumWork(model_id, rendered, targets, loss, inputs)


def _targets(datum: Datum, length: int, vocab_size: int) -> NDArray[np.int64]:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise UserError("loss_fn_inputs has no target_tokens")
    targets = datum.loss_fn_inputs["target_tokens"]
    if targets.dtype != np.int64:
        raise UserError(f"target_tokens must be int64, got {targets.dtype}")
    if targets.ndim not in (1, 2) or targets.shape[0] != length or 0 in targets.shape:
        raise UserError(
            f"target_tokens has shape {targets.shape}, but the model input has {length} positions: send ({length},) or ({length}, K)"
        )
    check_token_ids(targets, vocab_size, "target_tokens")
    return targets.astype(np.int64, copy=False)


def _loss_input(datum: Datum, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if name not in datum.loss_fn_inputs:
        if name == "weights":  # target_tokens alone means that every token counts once
            return np.ones(shape, dtype=np.float32)
        raise UserError(f"loss_fn_inputs has no {name}")
    values = datum.loss_fn_inputs[name]
    if values.shape != shape:
        raise UserError(f"{name} has shape {values.shape}, target_tokens has {shape}; they must be equal")
    wrong = np.flatnonzero(~np.isfinite(values))
    if wrong.size:
        raise UserError(f"{name} at position {np.unravel_index(wrong[0], shape)[0]} is {values.flat[wrong[0]]}; it must be finite")
    return values.astype(np.float32)
