"""One question, one answer: `What is 3 + 4?` Reward 1 for the right number."""

import time
from dataclasses import dataclass
from typing import Any

from tinsmith.rl.env import Env, Message, Prompt, Step, Teacher, generator, user, visible


@dataclass
class Arithmetic(Env, Teacher):
    """Sums of `terms` numbers from 0 to `largest`. `delay_s` makes an answer's judgement slow, to try schedules with."""

    largest: int = 9
    terms: int = 2
    delay_s: float = 0.0

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Ask for a sum."""
        numbers = generator(prompt).integers(self.largest + 1, size=self.terms)
        self.answer = int(numbers.sum())
        return [user(f"What is {' + '.join(map(str, numbers))}?")], {"answer": self.answer}

    def step(self, text: str) -> Step:
        """Compare the answer with the sum."""
        time.sleep(self.delay_s)
        return Step([], float(visible(text) == str(self.answer)), True)

    def demonstrate(self) -> str:
        """The sum."""
        return str(self.answer)
