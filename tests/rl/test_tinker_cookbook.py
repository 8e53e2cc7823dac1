"""The cookbook's environments and policies as ours, and ours as its. Needs `tinker_cookbook`: `make test-rl` has it."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import trajectory_to_data
from tinker_cookbook.rl.rollouts import do_group_rollout

from tests.rl.scripted import Scripted, ids, rules
from tinsmith.rl.adapters.cookbook import CompleterOfPolicy, CookbookEnvGroupBuilder, PolicyOfCompleter, play_group
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.env import Prompt
from tinsmith.rl.generator import Generator
from tinsmith.rl.policy import Request
from tinsmith.rl.trajectory import Origin
from tinsmith.rl.workers import InlineWorkers

pytest.importorskip("tinker_cookbook")


SAID = ["4<|im_end|>", "2<|im_end|>", "1<|im_end|>"]


def answers(template: ChatTemplate) -> list[tuple[list[int], bool]]:
    return [(ids(template, said), True) for said in SAID]


def test_the_cookbook_plays_our_environment_to_the_data_that_we_make(plain: ChatTemplate) -> None:
    prompt = Prompt(0)  # its number is neither 4 nor 2 nor 1, so that all three guesses are made
    generator = Generator("guess_number", {}, rules(), plain, InlineWorkers())
    ours = asyncio.run(generator.play(Scripted(answers(plain)), prompt, Origin("guess_number", 0)))
    builder = CookbookEnvGroupBuilder("guess_number", {}, prompt, plain, group_size=1)
    theirs = asyncio.run(do_group_rollout(builder, CompleterOfPolicy(Scripted(answers(plain)), Request(max_tokens=10))))
    (datum,) = trajectory_to_data(theirs.trajectories_G[0], 1.0, include_provenance=False)
    (sample,) = ours.samples
    assert ours.turns == 3
    assert datum.model_input == tinker.ModelInput.from_ints(sample.stream.ids[:-1].tolist())
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


def test_we_play_the_cookbook_s_environment_with_its_policy(plain: ChatTemplate) -> None:
    builder = CookbookEnvGroupBuilder("guess_number", {}, Prompt(0), plain, group_size=2)
    policy = PolicyOfCompleter(Fixed(ids(plain, "4<|im_end|>")), sorted(plain.stop_ids))
    made = asyncio.run(play_group(builder, policy, Request(max_tokens=10), plain, Origin("theirs", 0)))
    generator = Generator("guess_number", {}, rules(), plain, InlineWorkers())
    ours = asyncio.run(generator.play(policy, Prompt(0), Origin("ours", 0)))
    assert [trajectory.origin.member for trajectory in made] == [0, 1]
    for trajectory in made:
        (sample,), (expected,) = trajectory.samples, ours.samples
        assert np.array_equal(sample.stream.ids, expected.stream.ids)
        assert sample.loss_mask.tolist() == expected.loss_mask.tolist()
        assert sample.rewards.tolist() == expected.rewards.tolist()
        assert sample.logprobs.tolist() == expected.logprobs.tolist()
        assert trajectory.metrics == ours.metrics
