"""Find a number by asking: the environment answers `higher` or `lower`. Whoever halves what is left always finds it in time.

Reward 1 for the number, at any guess; a guess that is no number ends the game.
"""

from dataclasses import dataclass
from typing import Any

from tinsmith.rl.env import Env, Message, Prompt, Step, Teacher, generator, user, visible


@dataclass
class GuessNumber(Env, Teacher):
    """A number from 1 to `largest`, to be found with `guesses` guesses (0: as many as halving needs)."""

    largest: int = 7
    guesses: int = 0

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Think of a number."""
        self.number = 1 + int(generator(prompt).integers(self.largest))
        self.left = self.guesses or self.largest.bit_length()
        self.low, self.high = 1, self.largest  # what the answers so far leave possible
        self.found = False
        return [user(f"Guess my number from 1 to {self.largest}. You have {self.left} guesses.")], {"number": self.number}

    def step(self, text: str) -> Step:
        """Answer a guess."""
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
        """The middle of what is left."""
        return str((self.low + self.high) // 2)

    def metrics(self) -> dict[str, float]:
        """Whether the number was found."""
        return {"found": float(self.found)}
