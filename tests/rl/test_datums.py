"""Advantages and corrections by their formulas, and datums in which position i predicts target i."""

import numpy as np
import pytest
import tinker

from tinsmith_rl.config import AdvantageKind
from tinsmith_rl.datums import (
    WeightedSample,
    advantages,
    has_variance,
    importance_weights,
    kl,
    kl_penalty,
    likelihood_datum,
    policy_datum,
    response_logprobs,
    scales,
)
from tinsmith_rl.sequences import EncodedImage, PlacedImage, TokenSequence, text_sequence
from tinsmith_rl.trajectory import TrainingSample, Turn, assemble


@pytest.mark.parametrize(
    ("kind", "rewards", "centred", "variance"),
    [
        ("grpo", [[1.0, 0.0, 0.0, 0.0]], [0.75, -0.25, -0.25, -0.25], 3 / 16),
        ("rloo", [[1.0, 0.0, 0.5]], [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5], 1.0),
        ("reinforce_pp", [[1.0, 0.0], [3.0, 1.0, 2.0]], [0.5, -0.5, 1.0, -1.0, 0.0], 0.5),
        ("batch", [[1.0], [0.0], [], [0.0, 1.0, 1.0]], [0.4, -0.6, -0.6, 0.4, 0.4], 0.24),
    ],
)
def test_advantages_are_those_of_their_formulas(
    kind: AdvantageKind, rewards: list[list[float]], centred: list[float], variance: float
) -> None:
    """rloo compares with the others and divides by nothing; the last two divide by the deviation of the whole batch."""
    made = advantages(kind, rewards)
    assert [len(group) for group in made] == [len(group) for group in rewards]
    assert np.concatenate(made) == pytest.approx(np.array(centred) / np.sqrt(variance), rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
def test_equal_rewards_give_exact_zeros(kind: AdvantageKind) -> None:
    third = [0.1] * 3
    assert np.mean(third) != 0.1  # what a difference from the mean would make an advantage of
    assert not has_variance(third)
    zero, other = advantages(kind, [third, [0.0, 1.0]])
    assert zero.tolist() == [0.0, 0.0, 0.0]
    assert other[1] > 0 > other[0]
    assert [group.tolist() for group in advantages(kind, [[0.7], []])] == [[0.0], []]
    assert [group.tolist() for group in advantages("batch", [[0.1, 0.1], [0.1]])] == [[0.0, 0.0], [0.0]]
    assert advantages("batch", []) == []


def test_corrections_are_those_of_their_formulas() -> None:
    """Importance weights up to their cap; a penalty that moves and does not punish; the divergence by its terms."""
    trainer, sampler = np.log(np.array([0.5, 0.9, 0.2], np.float32)), np.log(np.array([0.25, 0.1, 0.4], np.float32))
    assert importance_weights(trainer, sampler, 3.0) == pytest.approx([2.0, 3.0, 0.5])
    assert importance_weights(np.zeros(1, np.float32), np.full(1, -1000.0, np.float32), 2.0) == pytest.approx([2.0])
    penalty = kl_penalty(np.array([-1.0, -2.0], np.float32), np.array([-2.0, -2.0], np.float32), 0.1)
    assert penalty == pytest.approx([-0.05, 0.05])
    p, q = np.array([0.7, 0.2, 0.1], np.float32), np.array([0.5, 0.25, 0.25], np.float32)
    tokens = np.repeat([0, 1, 2], [7, 2, 1])  # as often as p says
    assert kl(np.log(p)[tokens], np.log(q)[tokens]) == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)
    assert kl(np.log(p), np.log(p)) == 0.0


def two_turns() -> TrainingSample:
    """Prompt [1, image of two, 2], sampled [3, 4], then [5] from outside, sampled [6]."""
    prompt = TokenSequence(np.array([1, 99, 99, 2], np.int32), (PlacedImage(1, EncodedImage(b"png", "png", 2)),))
    first = Turn(prompt, np.array([3, 4], np.int32), np.array([-0.5, -0.25], np.float32), 0.5)
    second = Turn(prompt + text_sequence([3, 4, 5]), np.array([6], np.int32), np.array([-0.75], np.float32), 1.0)
    (sample,) = assemble([first, second])
    return sample


def inputs(datum: tinker.Datum) -> dict[str, list[float]]:
    return {name: data.to_numpy().tolist() for name, data in datum.loss_fn_inputs.items()}


def test_position_i_of_a_datum_predicts_target_i() -> None:
    sample = two_turns()
    weighted = WeightedSample(sample, np.array([2.0, 2.0, 0.0, 2.0], np.float32), sample.logprobs)
    datum = policy_datum(weighted, "gspo", 0.5)
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=2)
    text = [tinker.EncodedTextChunk(tokens=tokens) for tokens in ([1], [2, 3, 4, 5])]
    assert datum.model_input.chunks == [text[0], image, text[1]]
    assert inputs(datum) == {
        "target_tokens": [99, 99, 2, 3, 4, 5, 6],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, -0.75],
        "advantages": [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
        "sequence_ratio_mask": [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    }
    assert set(inputs(policy_datum(weighted, "ppo", 1.0))) == {"target_tokens", "logprobs", "advantages"}
    assert inputs(likelihood_datum(sample, 0.5))["weights"] == [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.5]
    scores = tinker.TensorData(data=[0.0, 0.0, 0.0, -1.0, -2.0, -9.0, -3.0], dtype="float32", shape=[7])
    output = tinker.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord", loss_fn_outputs=[{"logprobs": scores}], metrics={}
    )
    assert response_logprobs(output, [sample])[0].tolist() == [-1.0, -2.0, -9.0, -3.0]


def test_scales_make_means_of_sums() -> None:
    sample = two_turns()
    assert scales([sample, sample], "tokens") == [1 / 6, 1 / 6]
    assert scales([sample, sample], "sequences") == [1 / 6, 1 / 6]
    (single,) = assemble([Turn(text_sequence([1]), np.array([3], np.int32), np.zeros(1, np.float32), 0.0)])
    assert scales([sample, single], "tokens") == [1 / 4, 1 / 4]
    assert scales([sample, single], "sequences") == pytest.approx([1 / 6, 1 / 2])
    assert scales([sample, single], "sum") == [1.0, 1.0]
