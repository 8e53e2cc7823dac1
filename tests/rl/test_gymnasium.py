"""Gymnasium environments as ours: one that renders, and one whose observation is an image."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

from tinsmith_rl.adapters.gymnasium import GymnasiumEnv
from tinsmith_rl.env import Prompt
from tinsmith_rl.errors import ConfigError


class Lamp(gymnasium.Env[NDArray[np.uint8], int]):
    """An image that is dark or bright; switching it as often as the seed says ends the episode with a reward."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Box(0, 255, (8, 6, 3), np.uint8)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        super().reset(seed=seed)
        self.bright, self.left = False, 1 + int(self.np_random.integers(3))
        return self._seen(), {"left": self.left}

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        self.bright ^= action == 1
        self.left -= action
        return self._seen(), float(self.left == 0), self.left == 0, False, {}

    def _seen(self) -> NDArray[np.uint8]:
        return np.full((8, 6, 3), 255 * self.bright, np.uint8)


class Rendered(Lamp):
    """The same with a number as observation, and an image on request."""

    observation_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(4)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def render(self) -> Any:
        return self._seen()


@pytest.mark.parametrize("env", [Lamp(), Rendered("rgb_array")])
def test_an_episode_shows_images_and_earns_rewards(env: Lamp) -> None:
    adapted = GymnasiumEnv(env, {"leave": 0, "switch": 1}.__getitem__, "Do what?")
    messages, notes = adapted.init(Prompt(3))
    shown: Any = [messages[0]["content"]]
    rewards, done = [], False
    while not done:
        observations, reward, done, _ = adapted.step("<think>dark</think> switch")
        shown += [message["content"] for message in observations]
        rewards.append(reward)
    assert [(parts[0]["image"].size, parts[0]["image"].getpixel((0, 0))[0]) for parts in shown[:2]] == [
        ((6, 8), 0),
        ((6, 8), 255),
    ]
    assert shown[0][1] == {"type": "text", "text": "Do what?"}
    assert rewards == [0.0] * (notes["left"] - 1) + [1.0]
    assert adapted.init(Prompt(3))[1] == notes
    assert adapted.step("dance") == ([], 0.0, True, {})
    assert adapted.metrics() == {"steps": float(len(rewards)), "invalid": 1.0}


def test_an_environment_without_images_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="neither observes an image nor renders one; make it with render_mode='rgb_array'"
    ):
        GymnasiumEnv(Rendered(), int, "Do what?")
