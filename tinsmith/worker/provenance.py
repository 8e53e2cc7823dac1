"""Finds the recorded samples that a datum's tokens come from, and lays them over the datum's positions.

A client that samples with record_stability_info names the sequences that each datum's tokens come from
(`Datum.with_provenance` of the SDK), as sampled tokens or as parts of their prompts. All of it is checked: a ratio to
the log-probability of another token would silently train something else.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import UserError, quoted
from tinsmith.store import ids
from tinsmith.store.records import RecordedSequence
from tinsmith.wire.forward_backward import Datum, ProvenanceSpan

_FIELDS = ("model_input", "loss_fn_inputs")
"""Names in `Datum.with_provenance` of the fields that spans cover."""


def sequence_ids(data: Iterable[Datum], model_id: str) -> set[str]:
    """Return the ids of sequences that these datums name and that the model's own session sampled."""
    named = {span.sequence_id for datum in data for span in (*datum.model_input_spans, *datum.target_spans)}
    return {sequence_id for sequence_id in named if ids.session_of(sequence_id) == ids.session_of(model_id)}


def with_recorded(
    datum: Datum,
    model_input: NDArray[np.int64],
    targets: NDArray[np.int64],
    model_id: str,
    recorded: Mapping[str, RecordedSequence],
) -> Datum:
    """Add inputs "logprobs", as recorded, and "sequence_ratio_mask", 1 at sampled positions and 0 elsewhere.

    `model_input` [n] are its tokens, -1 in images, and `targets` [n] its target tokens. Raises UserError for spans that
    do not fit the datum or what was recorded, and for an advantage at a position that was not sampled.
    """
    if not datum.model_input_spans or not datum.target_spans:
        raise UserError(
            "the datum does not say which sampled sequences its tokens come from; stable_reinforce needs that: "
            "sample with record_stability_info=True, and name the sequences with Datum.with_provenance"
        )
    for field, spans, tokens in zip(
        _FIELDS, (datum.model_input_spans, datum.target_spans), (model_input, targets), strict=True
    ):
        _check_spans(field, spans, len(tokens), model_id, recorded)
    _check_tokens("model_input", model_input, datum.model_input_spans, recorded)
    _check_tokens("target_tokens", targets, datum.target_spans, recorded)
    logprobs, mask = np.zeros(len(targets), dtype=np.float32), np.zeros(len(targets), dtype=np.float32)
    start = 0
    for span in datum.target_spans:
        end = start + span.length
        if span.sampled:
            sequence = recorded[span.sequence_id]
            logprobs[start:end] = sequence.logprobs[span.offset : span.offset + span.length]
            mask[start:end] = 1
        start = end
    if not mask.any():
        raise UserError(
            "no target is a sampled token by its provenance, so stable_reinforce has nothing to train on; "
            "leave the datum out"
        )
    _check_advantages(datum, mask)
    return replace(datum, loss_fn_inputs=datum.loss_fn_inputs | {"logprobs": logprobs, "sequence_ratio_mask": mask})


def _check_spans(
    field: str, spans: tuple[ProvenanceSpan, ...], length: int, model_id: str, recorded: Mapping[str, RecordedSequence]
) -> None:
    """Check that each span lies inside of what was recorded, and that together they cover the field."""
    for number, span in enumerate(spans):
        name = f"provenance span {number} of {field}"
        if span.offset < 0 or span.length < 0:
            raise UserError(f"{name} has offset={span.offset}, length={span.length}; both must be at least 0")
        sequence = recorded.get(span.sequence_id)
        if sequence is None:
            raise UserError(
                f"{name} names sequence {quoted(span.sequence_id)}, {_why_absent(span.sequence_id, model_id)}"
            )
        kind, most = (
            ("sampled tokens", len(sequence.tokens)) if span.sampled else ("prompt tokens", sequence.prompt_length)
        )
        if span.offset + span.length > most:
            raise UserError(
                f"{name} is [{span.offset}, {span.offset + span.length}) of the {kind} of sequence {span.sequence_id}, "
                f"which has {most}"
            )
    covered = sum(span.length for span in spans)
    if covered != length:
        raise UserError(
            f"the provenance spans of {field} cover {covered} positions, but it has {length}: "
            "each must be in exactly one span"
        )


def _why_absent(sequence_id: str, model_id: str) -> str:
    session, own = ids.session_of(sequence_id), ids.session_of(model_id)
    if session != own:
        return (
            f"which is of session {quoted(session)}, but the model is of {own}; "
            "sample and train with clients of one ServiceClient"
        )
    return (
        "which is not recorded: it was sampled without record_stability_info=True, or more than a day has passed since "
        "it was sampled or trained on, or it had to make room for others (--recorded-sequences-gib); sample it again"
    )


def _check_tokens(
    field: str, tokens: NDArray[np.int64], spans: Iterable[ProvenanceSpan], recorded: Mapping[str, RecordedSequence]
) -> None:
    """Raise if tokens marked as sampled differ from the recorded sample, in the targets or in their context."""
    start = 0
    for span in spans:
        end = start + span.length
        if span.sampled:
            sampled = recorded[span.sequence_id].tokens[span.offset : span.offset + span.length]
            wrong = np.flatnonzero(tokens[start:end] != sampled)
            if wrong.size:
                first = int(wrong[0])
                found = tokens[start + first]
                raise UserError(
                    f"{field} at position {start + first} is {'of an image' if found < 0 else found}, "
                    f"but its provenance makes it token {span.offset + first} of sequence {span.sequence_id}, "
                    f"which is {sampled[first]}; name the tokens that were sampled"
                )
        start = end


def _check_advantages(datum: Datum, mask: NDArray[np.float32]) -> None:
    advantages = datum.loss_fn_inputs.get("advantages")
    if advantages is None or advantages.shape != mask.shape:
        return  # which is refused elsewhere
    wrong = np.flatnonzero((advantages != 0) & (mask == 0))
    if wrong.size:
        first = wrong[0]
        raise UserError(
            f"advantages at position {first} is {advantages[first]:g}, but its provenance says that the token was not "
            "sampled; "
            "stable_reinforce takes advantages of sampled tokens only: send 0 there"
        )
