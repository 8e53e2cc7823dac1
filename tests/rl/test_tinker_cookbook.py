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
from tinsmith_rl.adapters.cookbook import (
    CompleterOfPolicy,
    CookbookEnv,
    CookbookEnvGroupBuilder,
    CookbookRollouts,
    PolicyOfCompleter,
)
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.env import Prompt, deregister, register
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.policy import Policy, SamplingRequest, TinkerPolicy
from tinsmith_rl.rollouts import EnvRollouts
from tinsmith_rl.trainer import train
from tinsmith_rl.trajectory import EpisodeId, TrainingSample, Trajectory
from tinsmith_rl.workers import InlineWorkers

SAID = ["4<|im_end|>", "2<|im_end|>", "1<|im_end|>"]
"""Guesses of the number of `Prompt(0)`, which is none of them, so that all three are made."""


def scripted(template: ChatTemplate) -> Scripted:
    return Scripted([(ids(template, said), True) for said in SAID])


def played_by_us(env: str, policy: Policy, template: ChatTemplate, **changes: Any) -> TrainingSample:
    """The sample of an episode of one of our environments."""
    rollouts = EnvRollouts(env, {}, settings(**changes), template, InlineWorkers(600))
    (sample,) = asyncio.run(rollouts.play(policy, Prompt(0), EpisodeId(env, 0))).samples
    return sample


def test_the_cookbook_plays_our_environment_to_the_data_that_we_make(plain: ChatTemplate) -> None:
    sample = played_by_us("guess_number", scripted(plain), plain)
    builder = CookbookEnvGroupBuilder("guess_number", {}, Prompt(0), plain, group_size=1)
    theirs = asyncio.run(do_group_rollout(builder, CompleterOfPolicy(scripted(plain), SamplingRequest(max_tokens=10))))
    (datum,) = trajectory_to_data(theirs.trajectories_G[0], 1.0, include_provenance=False)
    assert len(sample.answers) == 3
    assert datum.model_input == tinker.ModelInput.from_ints(sample.sequence.ids[:-1].tolist())
    mask, logprobs = (datum.loss_fn_inputs[name].to_numpy()[-len(sample.loss_mask) :] for name in ("mask", "logprobs"))
    assert mask.astype(bool).tolist() == sample.loss_mask.tolist()
    assert logprobs == pytest.approx(sample.logprobs)
    assert sum(step.reward for step in theirs.trajectories_G[0].transitions) == sample.rewards.sum()


class Fixed:
    """A policy of the cookbook that always says the same."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    async def __call__(
        self, model_input: tinker.ModelInput, stop: Any, *, max_tokens: int | None = None
    ) -> TokensWithLogprobs:
        return TokensWithLogprobs(self.tokens, [-0.5] * len(self.tokens), "stop")


class Judged(CookbookEnvGroupBuilder):
    """Our GuessNumber as one of the cookbook's, whose last member is judged best, and one of whose members may be
    another one."""

    def __init__(
        self, prompt: Prompt, template: ChatTemplate, group_size: int, replaced: tuple[int, Env] | None = None
    ) -> None:
        super().__init__("guess_number", {}, prompt, template, group_size)
        self.replaced = replaced
        self.cleaned = 0

    async def make_envs(self) -> Sequence[Env]:
        envs = list(await super().make_envs())
        if self.replaced is not None:
            envs[self.replaced[0]] = self.replaced[1]
        return envs

    async def compute_group_rewards(
        self, trajectory_group: list[Any], env_group: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]:
        return [(float(env is env_group[-1]), {"best": float(env is env_group[-1])}) for env in env_group]

    async def cleanup(self) -> None:
        self.cleaned += 1


class Broken(Env):
    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        raise ValueError("no game today")

    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        raise AssertionError


def play(
    builder: EnvGroupBuilder, policy: Policy, template: ChatTemplate, size: int, **changes: Any
) -> tuple[Trajectory, ...]:
    """A group of theirs, played by us."""
    register("theirs", lambda prompt, group_size: builder)
    try:
        rollouts = CookbookRollouts("theirs", {}, settings(**changes), template)
        return asyncio.run(
            rollouts.play_group(policy, Prompt(0), [EpisodeId("theirs", 0, 7, member) for member in range(size)])
        )
    finally:
        deregister("theirs")


def fixed(template: ChatTemplate) -> PolicyOfCompleter:
    return PolicyOfCompleter(Fixed(ids(template, SAID[0])), sorted(template.stop_ids))


def test_we_play_the_cookbook_s_environment_with_its_policy(plain: ChatTemplate) -> None:
    builder = Judged(Prompt(0), plain, 2)
    made = play(builder, fixed(plain), plain, 2)
    expected = played_by_us("guess_number", fixed(plain), plain)
    assert [trajectory.episode.member for trajectory in made] == [0, 1]
    for trajectory, judged in zip(made, (0.0, 1.0), strict=True):
        (sample,) = trajectory.samples
        assert np.array_equal(sample.sequence.ids, expected.sequence.ids)
        assert sample.loss_mask.tolist() == expected.loss_mask.tolist()
        assert sample.rewards.tolist() == [*expected.rewards[:-1].tolist(), expected.rewards[-1] + judged]
        assert sample.logprobs.tolist() == expected.logprobs.tolist()
        assert (trajectory.stop_reason, trajectory.turns, trajectory.metrics["best"]) == ("done", 3, judged)
    assert builder.cleaned == 1


class Unrewarding(CookbookEnv):
    async def step(self, action: list[int], *, extra: Any = None) -> Any:
        return replace(await super().step(action, extra=extra), reward=None)


class Overflowing(Broken):
    async def initial_observation(self) -> Any:
        return InitialObservationOverflow(reward=-0.5, metrics={"stop/max_tokens": 1.0})


def test_what_goes_wrong_in_the_cookbook_s_environment_ends_its_episode(plain: ChatTemplate) -> None:
    unrewarding = "Unrewarding.step returned the reward None, which is not a finite number"
    for env, ending in (
        (Broken(), ("env_error", "ValueError: no game today", False)),
        (Unrewarding("guess_number", {}, Prompt(0), plain), ("env_error", unrewarding, False)),
        (Overflowing(), ("context", "", True)),
    ):
        bad, good = play(Judged(Prompt(0), plain, 2, replaced=(0, env)), fixed(plain), plain, 2)
        assert (bad.stop_reason, bad.error, bad.truncated, bad.usable) == (*ending, False)
        assert (good.stop_reason, good.reward) == ("done", 1.0)
    with pytest.raises(ConfigError, match="env='theirs' made 2 environments for a group of 3"):
        play(Judged(Prompt(0), plain, 2), fixed(plain), plain, 3)


def test_the_rules_limit_the_cookbook_s_rollouts_and_seeds_and_ends_reach_our_policy(plain: ChatTemplate) -> None:
    def ended(**changes: Any) -> tuple[Trajectory, list[SamplingRequest]]:
        policy = scripted(plain)
        (made,) = play(Judged(Prompt(0), plain, 1), policy, plain, 1, **changes)
        return made, policy.requests

    whole, requests = ended()
    room = whole.samples[0].prompt_length + 6
    for changes, ending in (
        ({}, ("done", [10] * 3)),
        ({"max_turns": 2}, ("max_turns", [10] * 2)),
        ({"max_context": room}, ("context", [6])),
    ):
        made, asked = ended(**changes)
        assert (made.stop_reason, [request.max_tokens for request in asked]) == ending
        assert [request.seed for request in asked] == [request.seed for request in requests][: made.turns]
    assert len({request.seed for request in requests}) == 3
    assert {request.stop_ids for request in requests} == {tuple(sorted(plain.stop_ids))}


def test_the_cookbook_s_own_policy_plays_as_ours_does(server_url: str, plain: ChatTemplate) -> None:
    with tinker.ServiceClient(base_url=server_url, api_key="tml-test") as service:
        client = service.create_sampling_client(base_model="tiny-vl").result()
        theirs = PolicyOfCompleter(TinkerTokenCompleter(client, max_tokens=10, temperature=0.0), sorted(plain.stop_ids))
        request = SamplingRequest(max_tokens=6, temperature=0.0)
        sample, ours = (
            played_by_us("color_square", policy, plain, request=request) for policy in (theirs, TinkerPolicy(client))
        )
    assert len(sample.loss_mask) > 0
    assert sample.model_input == ours.model_input
    assert sample.loss_mask.tolist() == ours.loss_mask.tolist()
    assert sample.logprobs == pytest.approx(ours.logprobs, abs=1e-5)


def arithmetic(prompt: Prompt, group_size: int, model: str) -> EnvGroupBuilder:
    """What a configuration names."""
    return CookbookEnvGroupBuilder(
        "arithmetic", {}, prompt, ChatTemplate.for_tokenizer(AutoTokenizer.from_pretrained(model)), group_size
    )


def test_a_run_trains_on_the_cookbook_s_environments(server_url: str, tmp_path: Path, plain: ChatTemplate) -> None:
    options = {"model": str(plain.tokenizer.name_or_path)}
    env = {"name": "tests.rl.test_tinker_cookbook:arithmetic", "kind": "cookbook", "options": options}
    evaluation = {"every": 1, "prompts": 2}
    config = config_of(server_url, tmp_path, env=env, evaluation=evaluation, warmup={"steps": 0}, training={"steps": 1})
    assert train(config, QUIET).step == 1
    trajectories = told(tmp_path, 1)
    assert [(told["group"], told["member"]) for told in trajectories] == [(g, m) for g in range(2) for m in range(3)]
    assert all(sample["sampled"] for told in trajectories for sample in told["samples"])
