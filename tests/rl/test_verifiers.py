"""A `verifiers` environment as ours. Needs `verifiers` 0.4, which no target installs: it brings some fifty packages."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rl.scripted import Scripted, ids, settings
from tinsmith_rl.adapters.verifiers import VerifiersEpisodes
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.env import Prompt, deregister, register
from tinsmith_rl.errors import UserError
from tinsmith_rl.rollouts import EnvRollouts
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import make_workers

sys.path.append(str(Path(__file__).parent / "verifiers_parts"))
PLAYER = {"harness": {"id": "countdown_tasks"}, "runtime": {"type": "subprocess"}}


@pytest.fixture(params=[False, True], ids=["text", "images"])
def episodes(request: pytest.FixtureRequest) -> Iterator[VerifiersEpisodes]:
    """Of an environment with three tasks; the third offers tools."""
    made = VerifiersEpisodes({"taskset": {"id": "countdown_tasks", "shows": request.param}, "player": PLAYER})
    yield made
    made.close()


def play(
    episodes: VerifiersEpisodes, template: ChatTemplate, said: list[list[str]], seeds: list[int]
) -> list[Trajectory]:
    """Episodes side by side."""

    async def all_of_them() -> list[Trajectory]:
        rollouts = EnvRollouts("countdown", {}, settings(), template, make_workers("thread", 4, timeout_s=20))
        answers = [[(ids(template, f"{text}<|im_end|>"), True) for text in episode] for episode in said]
        playing = [
            rollouts.play(Scripted(one), Prompt(seed), EpisodeId("countdown", seed))
            for one, seed in zip(answers, seeds, strict=True)
        ]
        return list(await asyncio.gather(*playing))

    register("countdown", episodes)
    try:
        return asyncio.run(all_of_them())
    finally:
        deregister("countdown")


def test_its_episodes_ask_us_and_are_scored_by_it(episodes: VerifiersEpisodes, plain: ChatTemplate) -> None:
    said = [["hot"], ["no", "cold"], ["a", "b", "c"]]
    made = play(episodes, plain, said, [0, 1, 3])
    assert [(trajectory.stop_reason, trajectory.reward, trajectory.turns) for trajectory in made] == [
        ("done", 1.0, 1),
        ("done", 0.5, 2),
        ("done", 0.0, 3),
    ]
    for trajectory, texts in zip(made, said, strict=True):
        (sample,) = trajectory.samples
        turns = range(2, len(texts) + 1)
        between = [f"<|im_end|>\n<|im_start|>user\nno, try {turn}<|im_end|>\n<|im_start|>assistant\n" for turn in turns]
        talk = "".join(text + after for text, after in zip(texts, [*between, "<|im_end|>"], strict=True))
        assert plain.decode(sample.response_ids.tolist()) == talk
        assert len(sample.sequence.images) == (1 if episodes.environment.taskset.config.shows else 0)
        assert trajectory.metrics["heard"] == trajectory.reward


def test_tools_are_refused_with_their_names(episodes: VerifiersEpisodes, plain: ChatTemplate) -> None:
    (made,) = play(episodes, plain, [["hot"]], [2])
    assert made.stop_reason == "env_error"
    assert "the program offers tools (look), and answers here are text" in made.error


def test_an_episode_that_is_left_ends(episodes: VerifiersEpisodes) -> None:
    env = episodes()
    messages, _ = env.init(Prompt(1))
    assert messages[-1]["role"] == "user"
    env.close()
    with pytest.raises(UserError, match="cancelled"):
        env.step("cold")
