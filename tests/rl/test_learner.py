"""What a batch becomes: advantages over samples, filters, corrections, optimizer steps; and what warm-up learns."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tinker
from numpy.typing import NDArray

from tests.rl.scripted import END, ids, settings
from tinsmith_rl.calls import FailureCounter, TooManyFailuresError
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.config import TrainingSection, WarmupSection
from tinsmith_rl.datums import kl, likelihood_datum, response_logprobs
from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, Teacher, user
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.groups import Group
from tinsmith_rl.learner import Learner, warm_up, weighted_samples
from tinsmith_rl.rollouts import EnvRollouts
from tinsmith_rl.sequences import text_sequence
from tinsmith_rl.trajectory import EpisodeId, StopReason, TrainingSample, Trajectory, Turn, assemble
from tinsmith_rl.workers import InlineWorkers


def turn(prompt: list[int], sampled: list[int], reward: float = 0.0) -> Turn:
    return Turn(text_sequence(prompt), np.array(sampled, np.int32), np.full(len(sampled), -1.0, np.float32), reward)


def trajectory(*turns: Turn, reason: StopReason = "done") -> Trajectory:
    return Trajectory(EpisodeId("test", 0), assemble(turns), reason, len(turns))


def group(*trajectories: Trajectory) -> Group:
    return Group(0, Prompt(0), 0, trajectories)


def test_all_steps_of_a_trajectory_share_its_advantage() -> None:
    # The second does not begin with the first
    stepwise = trajectory(turn([1, 2], [3, 4], 0.25), turn([1, 5], [6], 0.75))
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
    learner = Learner(client, settings, reference)
    metrics, _ = asyncio.run(learner.learn([group(*sampled(ANSWERS, before, 1.0))], 0))
    assert metrics["optimizer_steps"] == 1.0
    assert metrics["kl_reference"] == pytest.approx(kl(before.ravel(), wanted.ravel()), rel=1e-3)
    assert metrics["kl_sampler_trainer"] < 1e-6
    gap = before - wanted
    assert ((scores(client) - before) * (gap - gap.mean())).sum() < 0.0  # towards the reference


def test_groups_without_variance_teach_nothing_else_and_are_measured(server_url: str) -> None:
    client = model(server_url)
    learner, before = Learner(client, TrainingSection(), None), scores(client)
    metrics, learnt = asyncio.run(learner.learn([group(*sampled(ANSWERS, before, 1.0))], 0))
    assert not any(each.advantages.any() for each in learnt)
    assert np.array([each.trainer for each in learnt]) == pytest.approx(before, abs=1e-4)
    assert (metrics["optimizer_steps"], metrics["loss"]) == (0.0, 0.0)
    assert 0.0 <= metrics["kl_sampler_trainer"] < 1e-6
    assert np.array_equal(scores(client), before)
    stale = group(*sampled(ANSWERS, np.full((4, 3), -1.0, np.float32), 0.0))
    assert asyncio.run(learner.learn([stale], 0))[0]["kl_sampler_trainer"] > 0.1
    assert asyncio.run(learner.learn([group(trajectory(reason="empty"))], 0))[0]["kl_sampler_trainer"] == 0.0


def test_ratios_of_trainer_to_sampler_are_capped(server_url: str) -> None:
    client = model(server_url)
    before = scores(client)
    mixed = group(*sampled(ANSWERS[:2], before[:2] - 2.0, 1.0), *sampled(ANSWERS[2:], before[2:] + 0.5, 0.0))
    settings = TrainingSection(advantages="rloo", tis_cap=3.0, learning_rate=0.0)
    metrics, learnt = asyncio.run(Learner(client, settings, None).learn([mixed], 0))
    assert [each.advantages[0] for each in learnt] == pytest.approx(
        [2.0, 2.0, -np.exp(-0.5) * 2 / 3, -np.exp(-0.5) * 2 / 3], rel=1e-3
    )
    assert np.array([each.trainer for each in learnt]) == pytest.approx(before, abs=1e-4)
    assert metrics["tis_capped"] == 0.5
    assert metrics["tis_weight"] == pytest.approx((3.0 + np.exp(-0.5)) / 2, rel=1e-3)
    # Every sampled token weighs the same, at ratio one to the trainer's logprobs: the loss is minus the mean
    # corrected advantage.
    assert metrics["loss"] == pytest.approx(-(3.0 * 2 / 3 - np.exp(-0.5) * 2 / 3) / 2, rel=1e-3)


class Endless(Env, Teacher):
    """Never ends, unless its demonstration fails."""

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        self.fails = prompt.seed % 2
        return [user("more?")], {}

    def step(self, text: str) -> Step:
        return Step([user("more?")], 0.0, False)

    def demonstrate(self) -> str:
        if self.fails:
            raise ValueError("not today")
        return "more"


def demonstrated(env: str, template: ChatTemplate, seed: int = 0, **changes: Any) -> Trajectory:
    options = changes.pop("options", {})
    rollouts = EnvRollouts(env, options, settings(**changes), template, InlineWorkers(600))
    return asyncio.run(rollouts.play(None, Prompt(seed), EpisodeId(env, seed)))


def answers_of(trajectory: Trajectory) -> list[list[int]]:
    return [sample.response_ids[sample.loss_mask].tolist() for sample in trajectory.samples]


def test_a_demonstration_is_right_and_stands_in_the_template(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    played = demonstrated("guess_number", plain)
    assert (played.reward, played.stop_reason) == (1.0, "done")
    # Bisection from 4, towards the number that the seed chooses.
    one_turn = demonstrated("guess_number", plain, context_turns=1)
    texts = [plain.decode(answer) for answer in answers_of(one_turn)]
    assert texts[0] == "4" + END
    assert len(texts) == played.turns > 1
    assert answers_of(played) == [[token for text in texts for token in ids(plain, text)]]
    assert all(sample.loss_mask.all() for sample in one_turn.samples)
    thoughtful = demonstrated("guess_number", thinking, thought="hm</think>\n\n")
    assert answers_of(thoughtful) == [ids(thinking, f"hm</think>\n\n{text}") for text in texts]


ENDLESS = "tests.rl.test_learner:Endless"


def test_demonstrations_end_as_episodes_do_or_with_their_failure(plain: ChatTemplate) -> None:
    assert (demonstrated(ENDLESS, plain).turns, demonstrated(ENDLESS, plain).stop_reason) == (8, "max_turns")
    cut = demonstrated(
        ENDLESS, plain, max_context=len(ids(plain, "<|im_start|>user\nmore?<|im_end|>\n<|im_start|>assistant\n")) + 1
    )
    assert (cut.stop_reason, cut.sampled_tokens) == ("length", 1)
    assert demonstrated(ENDLESS, plain, seed=1).error == "ValueError: not today"
    with pytest.raises(ConfigError, match="Script has no demonstrations; derive it from Teacher, or set steps=0"):
        demonstrated("tests.rl.scripted:Script", plain, options={"opening": [user("hi")], "steps": []})


def test_a_warm_up_learns_from_what_succeeds_and_says_what_was_cut(
    server_url: str, plain: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = EnvRollouts(ENDLESS, {}, settings(max_turns=2), plain, InlineWorkers(600))
    warmup, client = WarmupSection(steps=3, episodes=4, learning_rate=1e-2), model(server_url)
    losses = asyncio.run(warm_up(client, rollouts, warmup, FailureCounter("endless", 0.5, 8)))
    assert losses == sorted(losses, reverse=True)
    assert "6 of 12 demonstrations were cut at generation: max_turns or max_context" in caplog.text
    with pytest.raises(
        TooManyFailuresError, match=r"environment 'endless' failed in 2 of 4 episodes.*the first failure was ValueError"
    ):
        asyncio.run(warm_up(client, rollouts, warmup, FailureCounter("endless", 0.4, 8)))
