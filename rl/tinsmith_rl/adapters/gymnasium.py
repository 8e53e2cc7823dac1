"""Gymnasium environments that observe or render images.

You supply a function from a text to an action, and a name:

    def lander() -> GymnasiumEnv:
        env = gymnasium.make("LunarLander-v3", render_mode="rgb_array")
        return GymnasiumEnv(env, ["nothing", "left", "main", "right"].index, question="Which engine?")

    register("lander", lander)
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from PIL import Image

from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, user, visible
from tinsmith_rl.errors import ConfigError


class GymnasiumEnv(Env):
    """An episode of `env`, reset with the prompt's seed. Each turn shows an image and asks `question`.

    `action_of` maps the model's answer (stripped, without reasoning) to an action. If it raises ValueError or KeyError,
    as `list.index` and dictionaries do, the episode ends without a reward. The image is the observation if that is one
    ([height, width, 1 or 3], uint8), else what `render` returns.
    """

    def __init__(self, env: "gymnasium.Env[Any, Any]", action_of: Callable[[str], Any], question: str) -> None:
        if not _is_image_space(env.observation_space) and env.render_mode != "rgb_array":
            raise ConfigError(
                f"{env} neither observes an image nor renders one; make it with render_mode='rgb_array' (it is "
                f"{env.render_mode!r})"
            )
        self.env, self.action_of, self.question = env, action_of, question
        self.steps, self.invalid = 0, False

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        observation, info = self.env.reset(seed=prompt.seed)
        return [self._shown(observation)], dict(info)

    def step(self, text: str) -> Step:
        """Take the action that the text means."""
        try:
            action = self.action_of(visible(text))
        except (ValueError, KeyError):
            self.invalid = True
            return Step([], 0.0, True)
        self.steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        done = bool(terminated or truncated)
        return Step([] if done else [self._shown(observation)], float(reward), done, dict(info))

    def close(self) -> None:
        self.env.close()

    def metrics(self) -> dict[str, float]:
        """The number of steps, and whether an answer that is no action ended the episode."""
        return {"steps": float(self.steps), "invalid": float(self.invalid)}

    def _shown(self, observation: Any) -> ChatMessage:
        pixels: Any = observation if _is_image_space(self.env.observation_space) else self.env.render()
        return user(Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels), self.question)


def _is_image_space(space: Any) -> bool:
    shape: tuple[int, ...] = space.shape or ()
    return len(shape) == 3 and shape[2] in (1, 3) and space.dtype == np.uint8
