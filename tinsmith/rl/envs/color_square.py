"""Two turns that only a picture can answer: name the colour of a square, then say on which side of a new picture that colour is.

Half of the reward for each turn; the second is asked whatever the first answer was.
"""

from dataclasses import dataclass
from typing import Any

from PIL import Image

from tinsmith.rl.env import Env, Message, Prompt, Step, Teacher, choose, generator, user, visible

COLORS = {"red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 60, 220), "yellow": (240, 210, 40), "black": (10, 10, 10)}
SIDES = ("left", "right")


@dataclass
class ColorSquare(Env, Teacher):
    """Pictures of `side` pixels a side."""

    side: int = 64

    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Show a square in one colour."""
        random = generator(prompt)
        self.color = choose(random, tuple(COLORS))
        self.other = choose(random, [name for name in COLORS if name != self.color])
        self.place = choose(random, SIDES)
        self.turn = 0
        self.right = [0.0, 0.0]
        picture = Image.new("RGB", (self.side, self.side), COLORS[self.color])
        return [user(picture, "Which colour is it?")], {"color": self.color, "place": self.place}

    def step(self, text: str) -> Step:
        """Score the colour and show two, or score the side."""
        expected = self.demonstrate()
        self.right[self.turn] = float(visible(text).lower() == expected)
        reward = 0.5 * self.right[self.turn]
        self.turn += 1
        if self.turn == 2:
            return Step([], reward, True)
        return Step([user(self._two_squares(), "On which side is that colour now?")], reward, False)

    def demonstrate(self) -> str:
        """The colour, then the side."""
        return (self.color, self.place)[self.turn]

    def metrics(self) -> dict[str, float]:
        """Which of the two answers were right."""
        return {"color_right": self.right[0], "side_right": self.right[1]}

    def _two_squares(self) -> Image.Image:
        names = (self.color, self.other) if self.place == "left" else (self.other, self.color)
        picture = Image.new("RGB", (self.side, self.side), COLORS[names[0]])
        picture.paste(COLORS[names[1]], (self.side // 2, 0, self.side, self.side))
        return picture
