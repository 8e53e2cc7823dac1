"""Samples become datums in which position i predicts target i, and a loss on the server sums over what was sampled."""

import numpy as np
import pytest
import tinker

from tinsmith.rl.assemble import assemble
from tinsmith.rl.datums import WeightedSample, likelihood_datum, policy_datum, response_logprobs, scales
from tinsmith.rl.pictures import Picture
from tinsmith.rl.stream import PlacedPicture, TokenStream, text_stream
from tinsmith.rl.trajectory import Sample, Turn


def two_turns() -> Sample:
    """Prompt [1, picture of two, 2], sampled [3, 4], then [5] from outside, sampled [6]."""
    prompt = TokenStream(np.array([1, 99, 99, 2], np.int32), (PlacedPicture(1, Picture(b"png", "png", 2)),))
    first = Turn(prompt, np.array([3, 4], np.int32), np.array([-0.5, -0.25], np.float32), 0.5)
    second = Turn(prompt + text_stream([3, 4, 5]), np.array([6], np.int32), np.array([-0.75], np.float32), 1.0)
    (sample,) = assemble([first, second])
    return sample


def inputs(datum: tinker.Datum) -> dict[str, list[float]]:
    return {name: data.to_numpy().tolist() for name, data in datum.loss_fn_inputs.items()}


def test_a_policy_datum_is_shifted_by_one() -> None:
    sample = two_turns()
    weighted = WeightedSample(sample, np.array([2.0, 2.0, 0.0, 2.0], np.float32), sample.logprobs)
    datum = policy_datum(weighted, "gspo", 0.5)
    picture = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=2)
    text = [tinker.EncodedTextChunk(tokens=tokens) for tokens in ([1], [2, 3, 4, 5])]
    assert datum.model_input.chunks == [text[0], picture, text[1]]
    assert inputs(datum) == {
        "target_tokens": [99, 99, 2, 3, 4, 5, 6],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, -0.75],
        "advantages": [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        "sequence_ratio_mask": [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    }
    assert set(inputs(policy_datum(weighted, "ppo", 1.0))) == {"target_tokens", "logprobs", "advantages"}


def test_a_likelihood_datum_weighs_what_was_sampled() -> None:
    assert inputs(likelihood_datum(two_turns(), 0.5))["weights"] == [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.5]


def test_the_trainer_s_logprobs_are_cut_to_the_response() -> None:
    scores = tinker.TensorData(data=[0.0, 0.0, 0.0, -1.0, -2.0, -9.0, -3.0], dtype="float32", shape=[7])
    output = tinker.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{"logprobs": scores}], metrics={})
    assert response_logprobs(output, [two_turns()])[0].tolist() == [-1.0, -2.0, -9.0, -3.0]


def test_scales_make_means_of_sums() -> None:
    sample = two_turns()
    assert scales([sample, sample], "tokens") == [1 / 6, 1 / 6]
    assert scales([sample, sample], "sequences") == [1 / 6, 1 / 6]
    (single,) = assemble([Turn(text_stream([1]), np.array([3], np.int32), np.zeros(1, np.float32), 0.0)])
    assert scales([sample, single], "tokens") == [1 / 4, 1 / 4]
    assert scales([sample, single], "sequences") == pytest.approx([1 / 6, 1 / 2])
    assert scales([sample, single], "sum") == [1.0, 1.0]
