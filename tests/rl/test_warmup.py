"""Demonstrations become samples of what the environment itself would say."""

import time

import pytest

from tests.rl.scripted import ids
from tinsmith.errors import ConfigError
from tinsmith.rl import registry
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.config import EnvSection
from tinsmith.rl.env import Prompt
from tinsmith.rl.warmup import demonstrated, samples_of

END = "<|im_end|>"


def test_a_demonstration_is_right_and_stands_in_the_template(plain: ChatTemplate, thinking: ChatTemplate) -> None:
    env = EnvSection(name="guess_number")
    played = demonstrated(env, Prompt(0), "")
    assert played.turns[-1][1].reward == 1.0
    (sample,) = samples_of(played, plain)
    said = [token for text, _ in played.turns for token in ids(plain, text + END)]
    assert sample.response_ids[sample.loss_mask].tolist() == said
    thoughtful = demonstrated(env, Prompt(0), "hm</think>\n\n")
    steps = samples_of(thoughtful, thinking)
    assert len(steps) == len(thoughtful.turns)
    assert [step.response_ids.tolist() for step in steps] == [ids(thinking, f"hm</think>\n\n{text}{END}") for text, _ in played.turns]
    one_turn = samples_of(played, plain, context_turns=1)
    assert [turn.response_ids.tolist() for turn in one_turn] == [ids(plain, text + END) for text, _ in played.turns]
    assert [turn.loss_mask.all() for turn in one_turn] == [True] * len(played.turns)


def test_an_environment_that_cannot_demonstrate_is_refused() -> None:
    registry.register("mute", "tests.rl.moody:Moody")
    try:
        with pytest.raises(ConfigError, match="the environment 'mute' has no demonstrations; it would have to be a Teacher"):
            demonstrated(EnvSection(name="mute"), Prompt(0), "")
    finally:
        registry.deregister("mute")


def test_a_delay_is_a_delay() -> None:
    start = time.monotonic()
    demonstrated(EnvSection(name="arithmetic", options={"delay_s": 0.05}), Prompt(0), "")
    assert time.monotonic() - start >= 0.05
