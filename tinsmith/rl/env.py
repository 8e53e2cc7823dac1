"""What an environment is: it opens a conversation, answers what the model says, and scores it.

    env = registry.make("maze2d", level="easy")
    messages, metadata = env.init(Prompt(seed=7))
    observations, reward, done, metadata = env.step("up")

Messages are in the OpenAI chat format. The content of a message is a text, or a list of parts: `text_part("...")`,
`image_part(picture)`, or OpenAI's `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`. An object serves one episode.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

import numpy as np
from PIL import Image


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str | list[dict[str, Any]]
    """A text, or parts of type "text", "image" and "image_url"."""


@dataclass(frozen=True)
class Prompt:
    """What one episode is about. All episodes of a group get the same prompt.

    Example: Prompt(seed=12), or Prompt(seed=0, messages=({"role": "user", "content": "2 + 2 ="},), fields={"answer": "4"})
    """

    seed: int = 0
    """Everything random in the episode follows from it."""
    messages: tuple[Message, ...] = ()
    """The conversation's opening, for an environment that takes it from a data set."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The rest of the data set's row, such as the right answer."""


class Step(NamedTuple):
    """What a step of an environment returns."""

    observations: list[Message]
    """What the environment says next; may be empty when `done`."""
    reward: float
    done: bool
    metadata: Mapping[str, Any] = {}
    """Anything worth keeping in the log of trajectories."""


class Env(ABC):
    """One episode. Steps may be slow, and may raise: that ends this trajectory with the reason, not the run."""

    @abstractmethod
    def init(self, prompt: Prompt) -> tuple[list[Message], dict[str, Any]]:
        """Begin the episode of `prompt`: the messages that the model sees first, and metadata for the log."""

    @abstractmethod
    def step(self, text: str) -> Step:
        """Take what the model said: its sampled text without the token that ended the turn."""

    def close(self) -> None:
        """Give back what the episode held. Called once, also after an error."""
        return

    def metrics(self) -> dict[str, float]:
        """Numbers about the finished episode, averaged over trajectories in logs and evaluations."""
        return {}


class Teacher(ABC):
    """An environment that knows a right answer, from which `warmup.py` makes demonstrations."""

    @abstractmethod
    def demonstrate(self) -> str:
        """What a perfect player would say now."""


def user(*parts: str | Image.Image) -> Message:
    """A user's message of texts and pictures."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    return {"role": "user", "content": [text_part(part) if isinstance(part, str) else image_part(part) for part in parts]}


def text_part(text: str) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "text", "text": text}


def image_part(picture: "Image.Image | bytes | str") -> dict[str, Any]:
    """A picture as a part of a message's content: a PIL image, the bytes of an image file, or a data URI."""
    return {"type": "image", "image": picture}


def visible(text: str) -> str:
    """What the model said after it thought: the text behind the last `</think>`, stripped."""
    return text.rpartition("</think>")[2].strip()


def generator(prompt: Prompt, *salt: int) -> np.random.Generator:
    """The episode's random numbers; `salt` tells several sources within one episode apart."""
    return np.random.default_rng([prompt.seed, *salt])


def choose(random: np.random.Generator, options: Sequence[str]) -> str:
    """One of the options."""
    return options[int(random.integers(len(options)))]
