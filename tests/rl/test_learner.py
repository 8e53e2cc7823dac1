"""What a batch becomes: advantages shared over samples, filters, corrections and optimizer steps; what warm-up learns."""

import asyncio
import time

import numpy as np
import pytest
import tinker
from numpy.typing import NDArray

from tests.rl.scripted import ids
from tinsmith.errors import ConfigError
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import EnvSection, TrainingSection
from tinsmith.rl.datums import kl, likelihood_datum, response_logprobs
from tinsmith.rl.env import Prompt, deregister, register
from tinsmith.rl.groups import Group
from tinsmith.rl.learner import Learner, demonstrated, demonstration_samples, weighted_samples
from tinsmith.rl.sequences import text_sequence
from tinsmith.rl.trajectory import EpisodeId, StopReason, TrainingSample, Trajectory, Turn, assemble


def turn(prompt: list[int], sampled: list[int], reward: float = 0.0) -> Turn:
    return Turn(text_sequence(prompt), np.array(sampled, np.int32), np.full(len(sampled), -1.0, np.float32), reward)


def trajectory(*turns: Turn, reason: StopReason = "done") -> Trajectory:
    return Trajectory(EpisodeId("test", 0), assemble(turns), reason, len(turns))


def group(*trajectories: Trajectory) -> Group:
    return Group(0, Prompt(0), 0, trajectories)


def test_all_steps_of_a_trajectory_share_its_advantage() -> None:
    stepwise = trajectory(turn([1, 2], [3, 4], 0.25), turn([1, 5], [6], 0.75))  # the second does not begin with the first
    merged = trajectory(turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]))
    failed = trajectory(turn([1, 2], [3], 9.0), reason="env_error")
    made = weighted_samples([group(stepwise, merged, failed)], TrainingSection(advantages="rloo"))
    assert [each.advantages.tolist() for each in made] == [[1.0, 1.0], [1.0], [-1.0, -1.0, 0.0, -1.0]]
    assert [each.sample.is_last_step for each in made] == [False, True, True]
    assert [each.logprobs.tolist() for each in made] == [[-1.0, -1.0], [-1.0], [-1.0, -1.0, 0.0, -1.0]]


def test_overlong_filtering_leaves_cut_trajectories_out_of_the_loss() -> None:
    good = group(trajectory(turn([1], [2, 3], 1.0)), trajectory(turn([1], [4, 5]), reason="length"))
    for filtering, masks, advantages in (
        (False, [[True, True], [True, True]], [[1.0, 1.0], [-1.0, -1.0]]),
        (True, [[True, True], [False, False]], [[1.0, 1.0], [0.0, 0.0]]),
    ):
        made = weighted_samples([good], TrainingSection(advantages="rloo", overlong_filtering=filtering))
        assert [each.sample.loss_mask.tolist() for each in made] == masks
        assert [each.advantages.tolist() for each in made] == advantages


PROMPT, ANSWERS = [5, 6, 7, 8], [[20, 21, 22], [30, 31, 32], [40, 41, 42], [50, 51, 52]]


def samples_of(answers: list[list[int]]) -> list[TrainingSample]:
    return [assemble([turn(PROMPT, answer)])[0] for answer in answers]


def scores(client: tinker.TrainingClient) -> NDArray[np.float32]:
    """[4, 3] the trainer's log-probabilities of the answers."""
    samples = samples_of(ANSWERS)
    output = client.forward([likelihood_datum(sample) for sample in samples], "cross_entropy").result()
    return np.array(response_logprobs(output, samples))


def sampled(answers: list[list[int]], logprobs: NDArray[np.float32], reward: float) -> list[Trajectory]:
    """The answers as if a sampler had given them with these log-probabilities [n, 3]."""
    rows = zip(answers, logprobs, strict=True)
    return [trajectory(Turn(text_sequence(PROMPT), np.array(answer, np.int32), row, reward)) for answer, row in rows]


def model(server_url: str) -> tinker.TrainingClient:
    """A new adapter."""
    service = tinker.ServiceClient(base_url=server_url, api_key="tml-test")
    client: tinker.TrainingClient = service.create_lora_training_client(base_model="tiny", rank=8, seed=0).result()
    return client


def test_groups_without_variance_feel_the_kl_penalty(server_url: str) -> None:
    taught, client = model(server_url), model(server_url)
    for _ in range(6):
        taught.forward_backward([likelihood_datum(sample, 0.1) for sample in samples_of(ANSWERS[:2])], "cross_entropy")
        taught.optim_step(tinker.AdamParams(learning_rate=3e-3, eps=1e-8)).result()
    before, wanted = scores(client), scores(taught)
    reference = taught.save_weights_and_get_sampling_client().result()
    settings = TrainingSection(learning_rate=1e-4, kl_coefficient=0.1)
    metrics = asyncio.run(Learner(client, settings, reference).learn([group(*sampled(ANSWERS, before, 1.0))], 0))
    assert metrics["optimizer_steps"] == 1.0
    assert metrics["kl_reference"] == pytest.approx(kl(before.ravel(), wanted.ravel()), rel=1e-3)
    assert metrics["kl_sampler_trainer"] < 1e-6
    gap = before - wanted
    assert ((scores(client) - before) * (gap - gap.mean())).sum() < 0.0  # towards the reference


def test_groups_without_variance_teach_nothing_else_and_are_measured(server_url: str) -> None:
    client = model(server_url)
    learner, before = Learner(client, TrainingSection(), None), scores(client)
    metrics = asyncio.run(learner.learn([group(*sampled(ANSWERS, before, 1.0))], 0))
    assert (metrics["optimizer_steps"], metrics["loss"]) == (0.0, 0.0)
    assert 0.0 <= metrics["kl_sampler_trainer"] < 1e-6
    assert np.array_equal(scores(client), before)
    stale = group(*sampled(ANSWERS, np.full((4, 3), -1.0, np.float32), 0.0))
    assert asyncio.run(learner.learn([stale], 0))["kl_sampler_trainer"] > 0.1
    assert asyncio.run(learner.learn([group(trajectory(reason="empty"))], 0))["kl_sampler_trainer"] == 0.0


def test_ratios_of_trainer_to_sampler_are_capped(server_url: str) -> None:
    client = model(server_url)
    before = scores(client)
    mixed = group(*sampled(ANSWERS[:2], before[:2] - 2.0, 1.0), *sampled(ANSWERS[2:], before[2:] + 0.5, 0.0))
    settings = TrainingSection(advantages="rloo", tis_cap=3.0, learning_rate=0.0)
    metrics = asyncio.run(Learner(client, settings, None).learn([mixed], 0))
    assert metrics["tis_capped"] == 0.5
    assert metrics["tis_weight"] == pytest.approx((3.0 + np.exp(-0.5)) / 2, rel=1e-3)
    # Every sampled token weighs the same, at a ratio of one to the trainer's own logprobs: the loss is minus the mean corrected advantage.
    assert metrics["loss"] == pytest.approx(-(3.0 * 2 / 3 - np.exp(-0.5) * 2 / 3) / 2, rel=1e-3)


END = "<|im_end|>"


def test_a_demonstration_is_right_and_stands_in_the_template(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    env = EnvSection(name="guess_number")
    played = demonstrated(env, Prompt(0), "")
    assert played.turns[-1][1].reward == 1.0
    (sample,) = demonstration_samples(played, plain)
    said = [token for text, _ in played.turns for token in ids(plain, text + END)]
    assert sample.response_ids[sample.loss_mask].tolist() == said
    thoughtful = demonstrated(env, Prompt(0), "hm</think>\n\n")
    steps = demonstration_samples(thoughtful, thinking)
    assert len(steps) == len(thoughtful.turns)
    assert [step.response_ids.tolist() for step in steps] == [ids(thinking, f"hm</think>\n\n{text}{END}") for text, _ in played.turns]
    one_turn = demonstration_samples(played, plain, context_turns=1)
    assert [turn.response_ids.tolist() for turn in one_turn] == [ids(plain, text + END) for text, _ in played.turns]
    assert [turn.loss_mask.all() for turn in one_turn] == [True] * len(played.turns)


def test_an_environment_that_cannot_demonstrate_is_refused() -> None:
    register("mute", "tests.rl.moody:Moody")
    try:
        with pytest.raises(ConfigError, match="the environment 'mute' has no demonstrations; derive it from Teacher, or set steps=0"):
            demonstrated(EnvSection(name="mute"), Prompt(0), "")
    finally:
        deregister("mute")


def test_a_delay_is_a_delay() -> None:
    start = time.monotonic()
    demonstrated(EnvSection(name="arithmetic", options={"delay_s": 0.05}), Prompt(0), "")
    assert time.monotonic() - start >= 0.05
