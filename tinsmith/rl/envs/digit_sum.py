"""Add handwritten digits: every turn shows `scans` scans and asks for their sum. Each turn's answer earns its share of the reward.

The scans are the 1,797 that scikit-learn ships (8 x 8 pixels, enlarged). The first 1,500 of a fixed shuffle are for training; `held_out`
takes the others.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tinsmith.rl.env import Env, Message, Prompt, Step, Teacher, generator, user, visible

TRAINING_SCANS = 1500


@cache
def _scans(held_out: bool, largest: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey values [n, 8, 8] and digits [n], no digit above `largest`."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[TRAINING_SCANS:] if held_out else order[:TRAINING_SCANS]
    chosen = chosen[data.target[chosen] <= largest]
    return (data.images[chosen] * 255 / 16).astype(np.uint8), data.target[chosen]


@dataclass
class DigitSum(Env, Teacher):
    """`turns` questions about `scans` scans each, of digits from 0 to `largest`, drawn `side` pixels a side."""

    turns: int = 2
    scans: int = 2
    largest: int = 9
    side: int = 64
    held_out: bool = False

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Ask for the first sum."""
        self.random = generator(prompt)
        self.turn, self.right = 0, 0
        return [self._question()], {"first_sum": self.sum}

    def step(self, text: str) -> Step:
        """Score an answer and ask the next."""
        correct = visible(text) == str(self.sum)
        self.right += correct
        self.turn += 1
        done = self.turn == self.turns
        return Step([] if done else [self._question()], correct / self.turns, done)

    def demonstrate(self) -> str:
        """The sum."""
        return str(self.sum)

    def metrics(self) -> dict[str, float]:
        """Share of right sums."""
        return {"sums_right": self.right / self.turns}

    def _question(self) -> Message:
        images, digits = _scans(self.held_out, self.largest)
        chosen = self.random.integers(len(digits), size=self.scans)
        self.sum = int(digits[chosen].sum())
        size = (self.side, self.side)
        pictures = [Image.fromarray(images[i]).resize(size, Image.Resampling.NEAREST) for i in chosen]
        return user(*pictures, "What is the sum?" if self.scans > 1 else "What digit is this?")
