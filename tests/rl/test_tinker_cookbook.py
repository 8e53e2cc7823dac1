"""The cookbook's environments and policies as ours, and ours as its. Needs `tinker_cookbook`: `make test-rl` has it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_cookbook.completers import TinkerTokenCompleter, TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, InitialObservationOverflow
from transformers import AutoTokenizer

from tests.rl.scripted import Scripted, ids, settings
from tests.rl.test_run import QUIET, config_of, told
from tinsmith.errors import ConfigError
from tinsmith.rl.adapters.cookbook import CompleterOfPolicy, CookbookEnv, CookbookEnvGroupBuilder, CookbookRollouts, PolicyOfCompleter
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.env import Prompt, deregister, register
from tinsmith.rl.policy import Policy, SamplingRequest, TinkerPolicy
from tinsmith.rl.rollouts import EnvRollouts
from tinsmith.rl.trainer import train
from tinsmith.rl.trajectory import EpisodeId, Trajectory
from tinsmith.rl.workers import InlineWorkers

SAID = ["4<|im_end|>", "2<|im_end|>", "1<|im_end|>"]


def answers(template: ChatTemplate) -> list[tuple[list[int], bool]]:
    return [(ids(template, said), True) for said in SAID]


def test_the_cookbook_plays_our_environment_to_the_data_that_we_make(plain: ChatTemplate) -> None:
    prompt = Prompt(0)  # its number is neither 4 nor 2 nor 1, so that all three guesses are made
    rollouts = EnvRollouts("guess_number", {}, settings(), plain, InlineWorkers(600))
    ours = asyncio.run(rollouts.play(Scripted(answers(plain)), prompt, EpisodeId("guess_number", 0)))
    builder = CookbookEnvGroupBuilder("guess_number", {}, prompt, plain, group_size=1)
    theirs = asyncio.run(do_group_rollout(builder, CompleterOfPolicy(Scripted(answers(plain)), SamplingRequest(max_tokens=10))))
    (datum,) = trajectory_to_data(theirs.trajectories_G[0], 1.0, include_provenance=False)
    (sample,) = ours.samples
    assert ours.turns == 3
    assert datum.model_input == tinker.ModelInput.from_ints(sample.sequence.ids[:-1].tolist())
    length = len(sample.loss_mask)
    assert datum.loss_fn_inputs["mask"].to_numpy()[-length:].astype(bool).tolist() == sample.loss_mask.tolist()
    assert datum.loss_fn_inputs["logprobs"].to_numpy()[-length:] == pytest.approx(sample.logprobs)
    assert sum(step.reward for step in theirs.trajectories_G[0].transitions) == ours.reward


class Fixed:
    """A policy of the cookbook that always says the same."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def __call__(self, model_input: tinker.ModelInput, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        return TokensWithLogprobs(self.tokens, [-0.5] * len(self.tokens), "stop")


class Judged(CookbookEnvGroupBuilder):
    """Our GuessNumber as one of the cookbook's, whose last member is judged best, and one of whose members may be another one."""

    def __init__(self, prompt: Prompt, template: ChatTemplate, group_size: int, replaced: tuple[int, Env] | None = None) -> None:
        super().__init__("guess_number", {}, prompt, template, group_size)
        self.replaced = replaced
        self.cleaned = 0

    async def make_envs(self) -> Sequence[Env]:
        envs = list(await super().make_envs())
        if self.replaced is not None:
            envs[self.replaced[0]] = self.replaced[1]
        return envs

    async def compute_group_rewards(self, trajectory_group: list[Any], env_group: Sequence[Env]) -> list[tuple[float, dict[str, float]]]:
        return [(float(env is env_group[-1]), {"best": float(env is env_group[-1])}) for env in env_group]

    async def cleanup(self) -> None:
        self.cleaned += 1


class Broken(Env):
    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        raise ValueError("no game today")

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        raise AssertionError


def play(builder: EnvGroupBuilder, policy: Policy, template: ChatTemplate, size: int, **changes: Any) -> tuple[Trajectory, ...]:
    """A group of theirs, played by us."""
    register("theirs", lambda prompt, group_size: builder)
    try:
        rollouts = CookbookRollouts("theirs", {}, settings(**changes), template)
        return asyncio.run(rollouts.play_group(policy, Prompt(0), [EpisodeId("theirs", 0, 7, member) for member in range(size)]))
    finally:
        deregister("theirs")


def test_we_play_the_cookbook_s_environment_with_its_policy(plain: ChatTemplate) -> None:
    policy = PolicyOfCompleter(Fixed(ids(plain, "4<|im_end|>")), sorted(plain.stop_ids))
    builder = Judged(Prompt(0), plain, 2)
    made = play(builder, policy, plain, 2)
    rollouts = EnvRollouts("guess_number", {}, settings(), plain, InlineWorkers(600))
    ours = asyncio.run(rollouts.play(policy, Prompt(0), EpisodeId("ours", 0)))
    assert [trajectory.episode.member for trajectory in made] == [0, 1]
    for trajectory, judged in zip(made, (0.0, 1.0), strict=True):
        (sample,), (expected,) = trajectory.samples, ours.samples
        assert np.array_equal(sample.sequence.ids, expected.sequence.ids)
        assert sample.loss_mask.tolist() == expected.loss_mask.tolist()
        assert sample.rewards.tolist() == [*expected.rewards[:-1].tolist(), expected.rewards[-1] + judged]
        assert sample.logprobs.tolist() == expected.logprobs.tolist()
        assert trajectory.metrics == {**ours.metrics, "best": judged}
        assert (trajectory.stop_reason, trajectory.turns) == ("done", 3)
    assert builder.cleaned == 1


class Unrewarding(CookbookEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        return replace(await super().step(action, extra=extra), reward=None)


def test_what_the_cookbook_s_environment_raises_or_wrongly_returns_ends_its_episode(plain: ChatTemplate) -> None:
    policy = PolicyOfCompleter(Fixed(ids(plain, "4<|im_end|>")), sorted(plain.stop_ids))
    unrewarding = "Unrewarding.step returned the reward None, which is not a finite number"
    for env, error in (
        (Broken(), "ValueError: no game today"),
        (Unrewarding("guess_number", {}, Prompt(0), plain), unrewarding),
    ):
        broken, good = play(Judged(Prompt(0), plain, 2, replaced=(0, env)), policy, plain, 2)
        assert (broken.stop_reason, broken.error, broken.usable) == ("env_error", error, False)
        assert (good.stop_reason, good.reward) == ("done", 1.0)
    with pytest.raises(ConfigError, match="env='theirs' made 2 environments for a group of 3"):
        play(Judged(Prompt(0), plain, 2), policy, plain, 3)


class Overflowing(Broken):
    async def initial_observation(self) -> Any:
        return InitialObservationOverflow(reward=-0.5, metrics={"stop/max_tokens": 1.0})


def test_an_opening_that_overflows_leaves_nothing_to_learn(plain: ChatTemplate) -> None:
    builder = Judged(Prompt(0), plain, 2, replaced=(0, Overflowing()))
    full, good = play(builder, Scripted(answers(plain)), plain, 2)
    assert (full.samples, full.usable, full.truncated) == ((), False, True)
    assert (good.stop_reason, good.reward) == ("done", 1.0)


def test_the_rules_limit_the_cookbook_s_rollouts(plain: ChatTemplate) -> None:
    def ended(**changes: Any) -> tuple[str, int, list[int]]:
        policy = Scripted(answers(plain))
        (made,) = play(Judged(Prompt(0), plain, 1), policy, plain, 1, **changes)
        return made.stop_reason, made.turns, [request.max_tokens for request in policy.requests]

    assert ended() == ("done", 3, [10, 10, 10])
    assert ended(max_turns=2) == ("max_turns", 2, [10, 10])
    opening = play(Judged(Prompt(0), plain, 1), Scripted(answers(plain)), plain, 1)[0].samples[0].prompt_length
    assert ended(max_context=opening + 6) == ("context", 1, [6])


def test_seeds_and_ends_reach_our_policy(plain: ChatTemplate) -> None:
    policy, again = Scripted(answers(plain)), Scripted(answers(plain))
    for played in (policy, again):
        play(Judged(Prompt(0), plain, 1), played, plain, 1)
    assert len({request.seed for request in policy.requests}) == 3
    assert [request.seed for request in policy.requests] == [request.seed for request in again.requests]
    assert {request.stop_ids for request in policy.requests} == {tuple(sorted(plain.stop_ids))}


def test_the_cookbook_s_own_policy_plays_as_ours_does(server_url: str, plain: ChatTemplate) -> None:
    with tinker.ServiceClient(base_url=server_url, api_key="tml-test") as service:
        client = service.create_sampling_client(base_model="tiny-vl").result()
        theirs = PolicyOfCompleter(TinkerTokenCompleter(client, max_tokens=10, temperature=0.0), sorted(plain.stop_ids))
        request = SamplingRequest(max_tokens=6, temperature=0.0)
        rollouts = EnvRollouts("color_square", {}, settings(request=request), plain, InlineWorkers(600))
        made, expected = (
            asyncio.run(rollouts.play(policy, Prompt(0), EpisodeId("color_square", 0))) for policy in (theirs, TinkerPolicy(client))
        )
    (sample,), (ours,) = made.samples, expected.samples
    assert len(sample.loss_mask) > 0
    assert sample.model_input == ours.model_input
    assert sample.loss_mask.tolist() == ours.loss_mask.tolist()
    assert sample.logprobs == pytest.approx(ours.logprobs, abs=1e-5)


def arithmetic(prompt: Prompt, group_size: int, model: str) -> EnvGroupBuilder:
    """What a configuration names."""
    return CookbookEnvGroupBuilder("arithmetic", {}, prompt, ChatTemplate.for_tokenizer(AutoTokenizer.from_pretrained(model)), group_size)


def test_a_run_trains_on_the_cookbook_s_environments(server_url: str, tmp_path: Path, plain: ChatTemplate) -> None:
    options = {"model": str(plain.tokenizer.name_or_path)}
    env = {"name": "tests.rl.test_tinker_cookbook:arithmetic", "kind": "cookbook", "options": options}
    evaluation = {"every": 1, "prompts": 2}
    config = config_of(server_url, tmp_path, env=env, evaluation=evaluation, warmup={"steps": 0}, training={"steps": 1})
    assert train(config, QUIET).step == 1
    trajectories = told(tmp_path, 1)
    assert [(told["group"], told["member"]) for told in trajectories] == [(g, m) for g in range(2) for m in range(3)]
    assert all(len(sample["response_ids"]) > 0 for told in trajectories for sample in told["samples"])
