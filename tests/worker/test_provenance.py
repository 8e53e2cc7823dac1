"""What was recorded of sampled tokens, laid over the positions of a datum; and whatever a client may say wrong of where
they come from.

Invariant: What was recorded when tokens were sampled is what they are trained with, also by another server; provenance
that does not fit it is refused. Also: `tests/store/test_recorded_sequences.py`,
`tests/acceptance/test_stable_reinforce.py`.
"""

from typing import Any

import numpy as np
import pytest

from tinsmith.errors import UserError
from tinsmith.store.records import RecordedSequence
from tinsmith.wire.chunks import TextChunk
from tinsmith.wire.forward_backward import Datum, ProvenanceSpan
from tinsmith.worker.provenance import sequence_ids, with_recorded

MODEL = "s:train:0"
FIRST, SECOND = "s:sample:0/4/0", "s:sample:1/7/3"

RECORDED = {
    FIRST: RecordedSequence(3, np.array([11, 12, 13], dtype=np.int32), np.array([-1.0, -2.0, -3.0], dtype=np.float32)),
    SECOND: RecordedSequence(8, np.array([21, 22], dtype=np.int32), np.array([-4.0, -5.0], dtype=np.float32)),
}


def prompt(sequence_id: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(sequence_id, offset, length, sampled=False)


def sampled(sequence_id: str, offset: int, length: int) -> ProvenanceSpan:
    return ProvenanceSpan(sequence_id, offset, length, sampled=True)


INPUT_SPANS = (prompt(FIRST, 0, 3), sampled(FIRST, 0, 3), prompt(SECOND, 6, 2), sampled(SECOND, 0, 1))
TARGET_SPANS = (prompt(FIRST, 1, 2), sampled(FIRST, 0, 3), prompt(SECOND, 6, 2), sampled(SECOND, 0, 2))
TARGETS = np.array([2, 3, 11, 12, 13, 4, 5, 21, 22])
"""Two turns of a conversation: a prompt of three tokens, three sampled ones, two more of a prompt, two sampled ones."""


def conversation(**changes: Any) -> Datum:
    tokens = np.array([1, *TARGETS[:-1]], dtype=np.int32)
    inputs = {"target_tokens": TARGETS, "advantages": np.array([0, 0, 1, 1, 0, 0, 0, -1, -1], dtype=np.float32)}
    return Datum(
        **{
            "chunks": [TextChunk(tokens)],
            "loss_fn_inputs": inputs,
            "model_input_spans": INPUT_SPANS,
            "target_spans": TARGET_SPANS,
        }
        | changes
    )


MODEL_INPUT = np.array([1, *TARGETS[:-1]])


def laid_over(datum: Datum, targets: Any = TARGETS, model_input: Any = MODEL_INPUT) -> Datum:
    return with_recorded(datum, model_input, targets, MODEL, RECORDED)


@pytest.mark.parametrize("sent", [{}, {"logprobs": np.full(9, -9.0), "sequence_ratio_mask": np.ones(9)}])
def test_each_turn_has_the_logprobs_with_which_it_was_sampled(sent: dict[str, Any]) -> None:
    """Whatever the datum says of them."""
    datum = conversation()
    inputs = laid_over(conversation(loss_fn_inputs=datum.loss_fn_inputs | sent)).loss_fn_inputs
    assert inputs["logprobs"].tolist() == [0, 0, -1, -2, -3, 0, 0, -4, -5]
    assert inputs["sequence_ratio_mask"].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert inputs["advantages"].tolist() == [0, 0, 1, 1, 0, 0, 0, -1, -1]


def test_a_part_of_a_sequence_has_its_part_of_the_logprobs() -> None:
    spans = (sampled(FIRST, 1, 2), prompt(SECOND, 0, 0), sampled(SECOND, 1, 1), sampled(FIRST, 0, 0))
    datum = Datum([], {"advantages": np.ones(3, dtype=np.float32)}, (prompt(FIRST, 0, 3),), spans)
    assert laid_over(datum, np.array([12, 13, 22]), np.array([1, 2, 3])).loss_fn_inputs["logprobs"].tolist() == [
        -2,
        -3,
        -5,
    ]


def test_sequences_of_other_sessions_are_not_asked_for() -> None:
    other = conversation(target_spans=(sampled("else:sample:0/4/0", 0, 9),))
    assert sequence_ids([conversation(), other], MODEL) == {FIRST, SECOND}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_input_spans": (), "target_spans": ()},
            "does not say which sampled sequences .*record_stability_info=True.*with_provenance",
        ),
        ({"target_spans": ()}, "does not say which sampled sequences"),
        (
            {"model_input_spans": INPUT_SPANS[:-1]},
            "spans of model_input cover 8 positions, but it has 9: each must be in exactly one span",
        ),
        (
            {"target_spans": (*TARGET_SPANS, prompt(FIRST, 0, 1))},
            "spans of loss_fn_inputs cover 10 positions, but it has 9",
        ),
        (
            {"target_spans": (sampled(FIRST, -1, 2), *TARGET_SPANS)},
            "span 0 of loss_fn_inputs has offset=-1, length=2; both must be at least 0",
        ),
        ({"model_input_spans": (prompt(FIRST, 0, -2), *INPUT_SPANS)}, "span 0 of model_input has offset=0, length=-2"),
        (
            {"target_spans": (*TARGET_SPANS[:3], sampled(SECOND, 1, 2))},
            rf"span 3 of loss_fn_inputs is \[1, 3\) of the sampled tokens of sequence {SECOND}, which has 2",
        ),
        (
            {"model_input_spans": (*INPUT_SPANS[:2], prompt(SECOND, 7, 2), sampled(SECOND, 0, 1))},
            rf"span 2 of model_input is \[7, 9\) of the prompt tokens of sequence {SECOND}, which has 8",
        ),
        (
            {"target_spans": (*TARGET_SPANS[:3], sampled("s:sample:0/5/0", 0, 2))},
            (
                "span 3 of loss_fn_inputs names sequence 's:sample:0/5/0', which is not recorded: "
                "it was sampled without .*; sample it again"
            ),
        ),
        (
            {"target_spans": (*TARGET_SPANS[:3], sampled("else:sample:0/5/0", 0, 2))},
            (
                "names sequence 'else:sample:0/5/0', which is of session 'else', but the model is of s; "
                "sample and train with clients of one"
            ),
        ),
        (
            {"target_spans": (*TARGET_SPANS[:3], sampled("x", 0, 2))},
            "names sequence 'x', which is of session '', but the model is of s",
        ),
        (
            {"target_spans": (prompt(FIRST, 1, 2), sampled(FIRST, 0, 3), prompt(SECOND, 5, 3), sampled(SECOND, 0, 1))},
            (
                f"target_tokens at position 8 is 22, but its provenance makes it token 0 of sequence {SECOND}, "
                "which is 21; name the"
            ),
        ),
        (
            {"target_spans": (prompt(FIRST, 1, 2), sampled(FIRST, 0, 1), prompt(SECOND, 3, 4), sampled(SECOND, 0, 2))},
            "advantages at position 3 is 1, but its provenance says that the token was not sampled; .*: send 0 there",
        ),
        (
            {"target_spans": (prompt(SECOND, 0, 8), prompt(SECOND, 0, 1))},
            "no target is a sampled token by its provenance",
        ),
    ],
)
def test_wrong_provenance_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        laid_over(conversation(**changes))


@pytest.mark.parametrize(("token", "named"), [(99, "99"), (-1, "of an image")])
def test_targets_follow_the_tokens_that_they_were_sampled_after(token: int, named: str) -> None:
    other = MODEL_INPUT.copy()
    other[4] = token
    message = (
        f"model_input at position 4 is {named}, but its provenance makes it token 1 of sequence {FIRST}, which is 12; "
        "name the tokens"
    )
    with pytest.raises(UserError, match=message):
        laid_over(conversation(), model_input=other)


def test_a_sampled_token_without_advantage_may_be_called_a_prompts() -> None:
    spans = (prompt(FIRST, 1, 2), sampled(FIRST, 0, 2), prompt(SECOND, 4, 3), sampled(SECOND, 0, 2))
    assert laid_over(conversation(target_spans=spans)).loss_fn_inputs["sequence_ratio_mask"].tolist() == [
        0,
        0,
        1,
        1,
        0,
        0,
        0,
        1,
        1,
    ]
