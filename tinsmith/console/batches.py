"""A run's first batches as the model sees them: its tokens as text, each with the weight that its prediction has."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinsmith.wire.chunks import ImageChunk, TextChunk
from tinsmith.wire.forward_backward import Datum, ForwardBackwardRequest

DATUMS, TOKENS = 8, 600
"""Most datums of a request, and most tokens of each, that are shown."""
_WEIGHTS = ("weights", "mask", "advantages")
"""Inputs of a loss that say how much the prediction of a token counts; the first that is there is shown."""
_LEVELS = 4
"""Shades of a colour."""


@dataclass(frozen=True)
class _Place:
    """A position of a sequence: a token of text, or an image with all its tokens."""

    token: int | None
    length: int | None = 1
    """Tokens; None if only the model's image processor knows."""


def describe_batch(seq_id: int, request: ForwardBackwardRequest, decode: Callable[[int], str]) -> dict[str, Any]:
    """Return what is shown of a request, whose tokens `decode` turns into text."""
    names = {name for datum in request.data for name in datum.loss_fn_inputs}
    shown = next((name for name in _WEIGHTS if name in names), None)
    return {
        "seq_id": seq_id,
        "loss": request.loss_fn,
        "gradients": not request.forward_only,
        "datum_count": len(request.data),
        "shown": shown,
        "datums": [_described(datum, shown, decode) for datum in request.data[:DATUMS]],
    }


def _described(datum: Datum, shown: str | None, decode: Callable[[int], str]) -> dict[str, Any]:
    places = _places(datum)
    targets = _flat(datum.loss_fn_inputs.get("target_tokens"))
    weights = None if shown is None else _flat(datum.loss_fn_inputs.get(shown))
    highest = max((abs(each) for each in weights or () if math.isfinite(each)), default=0.0)
    tokens: list[dict[str, Any]] = []
    position: int | None = 0
    for place in places[:TOKENS]:
        before = None if position is None or position == 0 else position - 1  # whose prediction this token is
        weight = weights[before] if weights and before is not None and before < len(weights) else None
        if weights and position == 0:
            weight = 0.0  # nothing predicts the first token
        tokens.append(_token(place, weight, highest, decode))
        position = None if position is None or place.length is None else position + place.length
    if position is not None and len(places) <= TOKENS and targets and len(targets) == position:
        # The last target is no input: nothing follows it
        weight = weights[-1] if weights and len(weights) == len(targets) else None
        tokens.append(_token(_Place(int(targets[-1])), weight, highest, decode))
    counted = [each for each in weights or () if each]
    return {
        "length": sum(place.length or 0 for place in places),
        "weighted": len(counted) if weights is not None else None,
        "cut": len(places) > TOKENS,
        "tokens": joined(tokens),
    }


def _places(datum: Datum) -> list[_Place]:
    places: list[_Place] = []
    for chunk in datum.chunks:
        if isinstance(chunk, TextChunk):
            places += [_Place(int(token)) for token in chunk.tokens]
        elif isinstance(chunk, ImageChunk):
            places.append(_Place(None, chunk.expected_tokens))
    return places


def _flat(array: Any) -> list[float] | None:
    """Return the numbers of an array with one for each position; None of another one."""
    return None if array is None or array.ndim != 1 else [float(each) for each in array]


def _token(place: _Place, weight: float | None, highest: float, decode: Callable[[int], str]) -> dict[str, Any]:
    if place.token is None:
        return {"image": place.length, "weight": None, "shade": ""}
    return {"text": decode(place.token), "weight": _told(weight), "shade": _shade(weight, highest)}


def _told(weight: float | None) -> float | str | None:
    return weight if weight is None or math.isfinite(weight) else str(weight)


def _shade(weight: float | None, highest: float) -> str:
    """Return the class of a weight: `p1` to `p4` above 0, `m1` to `m4` below, `z` for 0, empty for none."""
    if weight is None or not math.isfinite(weight):
        return ""
    if weight == 0 or highest == 0:
        return "z"
    return f"{'p' if weight > 0 else 'm'}{max(1, math.ceil(_LEVELS * abs(weight) / highest))}"


def joined(tokens: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join neighbours without weight, of which a long prompt has many."""
    found: list[dict[str, Any]] = []
    for token in tokens:
        if found and "text" in token and "text" in found[-1] and token["shade"] == found[-1]["shade"] == "z":
            found[-1] = {**token, "text": found[-1]["text"] + token["text"]}
        else:
            found.append(token)
    return found
