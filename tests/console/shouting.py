"""An environment with pictures, whose texts a page would obey if it took them for HTML."""

from typing import Any

from PIL import Image

from tests.console.hostile import HOSTILE
from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, user


class Shouting(Env):
    """Two turns; rewards differ with the length of an answer, and every seventh task breaks."""

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        self.seed, self.turns = prompt.seed, 0
        shade = Image.new("RGB", (64, 32), ((prompt.seed * 70) % 256, 90, 160))
        return [user(shade, f"number {prompt.seed} {HOSTILE}")], {"note": HOSTILE}

    def step(self, text: str) -> Step:
        self.turns += 1
        if self.seed % 7 == 5:
            raise ValueError(HOSTILE)
        return Step([user(f"again {HOSTILE}")], float(len(text) % 3) / 2 - 0.5, self.turns == 2)
