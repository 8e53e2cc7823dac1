"""Small environments that ask questions: sums, colours, digits and a guessing game.

Models of any size learn them within minutes.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, Teacher, choose, generator, user, visible

COLORS = {
    "red": (220, 30, 30),
    "green": (30, 170, 60),
    "blue": (40, 60, 220),
    "yellow": (240, 210, 40),
    "black": (10, 10, 10),
}
TRAINING_SCANS = 1500


@dataclass
class Arithmetic(Env, Teacher):
    """One question, one answer: `What is 3 + 4?` Reward 1 for the right number.

    The sum has `terms` numbers from 0 to `largest`. `delay_s` slows the check, to try out asynchronous training.
    """

    largest: int = 9
    terms: int = 2
    delay_s: float = 0.0

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        numbers = generator(prompt).integers(self.largest + 1, size=self.terms)
        self.answer = int(numbers.sum())
        return [user(f"What is {' + '.join(map(str, numbers))}?")], {"answer": self.answer}

    def step(self, text: str) -> Step:
        time.sleep(self.delay_s)
        return Step([], float(visible(text) == str(self.answer)), True)

    def demonstrate(self) -> str:
        return str(self.answer)


@dataclass
class ColorSquare(Env, Teacher):
    """Two turns that only images can answer: name the colour of a square, then the other colour of the next one.

    Half of the reward for each turn; the second square is shown whatever the first answer was. Images are `side` pixels
    wide and high.
    """

    side: int = 64

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Show the first square."""
        random = generator(prompt)
        first = choose(random, tuple(COLORS))
        self.colors = (first, choose(random, [name for name in COLORS if name != first]))
        self.right: list[float] = []
        return [user(self._square(), "Which colour is it?")], {"colors": self.colors}

    def step(self, text: str) -> Step:
        """Score the answer, and show the second square after the first."""
        self.right.append(float(visible(text).lower() == self.demonstrate()))
        done = len(self.right) == 2
        return Step([] if done else [user(self._square(), "Which is it now?")], 0.5 * self.right[-1], done)

    def demonstrate(self) -> str:
        return self.colors[len(self.right)]

    def metrics(self) -> dict[str, float]:
        return {f"{which}_right": right for which, right in zip(("first", "second"), self.right, strict=False)}

    def _square(self) -> Image.Image:
        return Image.new("RGB", (self.side, self.side), COLORS[self.demonstrate()])


@dataclass
class DigitSum(Env, Teacher):
    """Add handwritten digits: each turn shows `scans` scans and asks for their sum, for an equal share of the reward.

    The scans are the 1,797 of scikit-learn (8 x 8 pixels, enlarged to `side`), of digits from 0 to `largest`. The first
    1,500 of a fixed shuffle are for training; `held_out` takes the others.
    """

    turns: int = 2
    scans: int = 2
    largest: int = 9
    side: int = 64
    held_out: bool = False

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        self.random = generator(prompt)
        self.turn, self.right = 0, 0
        return [self._question()], {"first_sum": self.sum}

    def step(self, text: str) -> Step:
        """Score an answer and ask the next question."""
        correct = visible(text) == str(self.sum)
        self.right += correct
        self.turn += 1
        done = self.turn == self.turns
        return Step([] if done else [self._question()], correct / self.turns, done)

    def demonstrate(self) -> str:
        return str(self.sum)

    def metrics(self) -> dict[str, float]:
        return {"sums_right": self.right / self.turns}

    def _question(self) -> ChatMessage:
        grey, digits = _scans(self.held_out, self.largest)
        chosen = self.random.integers(len(digits), size=self.scans)
        self.sum = int(digits[chosen].sum())
        size = (self.side, self.side)
        images = [Image.fromarray(grey[i]).resize(size, Image.Resampling.NEAREST) for i in chosen]
        return user(*images, "What is the sum?" if self.scans > 1 else "What digit is this?")


@cache
def _scans(held_out: bool, largest: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Grey values [n, 8, 8] and digits [n], without digits above `largest`."""
    from sklearn.datasets import load_digits  # only this environment needs scikit-learn

    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    chosen = order[TRAINING_SCANS:] if held_out else order[:TRAINING_SCANS]
    chosen = chosen[data.target[chosen] <= largest]
    return (data.images[chosen] * 255 / 16).astype(np.uint8), data.target[chosen]


@dataclass
class GuessNumber(Env, Teacher):
    """Find a number from 1 to `largest` with `guesses` guesses; after each the environment says `higher` or `lower`.

    Reward 1 for the number, at any guess; what is no number ends the game. 0 guesses: as many as bisection needs.
    """

    largest: int = 7
    guesses: int = 0

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Choose a number."""
        self.number = 1 + int(generator(prompt).integers(self.largest))
        self.left = self.guesses or self.largest.bit_length()
        self.low, self.high = 1, self.largest  # the numbers that are still possible
        self.found = False
        return [user(f"Guess my number from 1 to {self.largest}. You have {self.left} guesses.")], {
            "number": self.number
        }

    def step(self, text: str) -> Step:
        """Compare a guess with the number."""
        guess = visible(text)
        if not guess.isascii() or not guess.isdigit():
            return Step([user("That is no number.")], 0.0, True)
        self.left -= 1
        self.found = int(guess) == self.number
        if self.found:
            return Step([user("Right!")], 1.0, True)
        if int(guess) < self.number:
            self.low = max(self.low, int(guess) + 1)
            return Step([user("higher")], 0.0, self.left == 0)
        self.high = min(self.high, int(guess) - 1)
        return Step([user("lower")], 0.0, self.left == 0)

    def demonstrate(self) -> str:
        """The middle of the possible numbers."""
        return str((self.low + self.high) // 2)

    def metrics(self) -> dict[str, float]:
        return {"found": float(self.found)}
