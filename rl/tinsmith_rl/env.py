"""The interface of an environment, and the registry of their names.

An environment opens a conversation, reads what the model says, replies and gives rewards. One object serves one
episode:

    env = make("maze2d", level="easy")
    messages, metadata = env.init(Prompt(seed=7))
    observations, reward, done, metadata = env.step("up")

Messages have the form of OpenAI's chat API. The content of a message is a text, or a list of parts: `text_part("...")`,
`image_part(image)`, or `{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}`.

A configuration file names an environment by a registered name, or by an import path such as "my_package.envs:MyEnv" or
"my_env.py:MyEnv", which needs no registration. The object behind either is a factory: a class or a function that
returns a new `Env`.
"""

import importlib
import inspect
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np

from tinsmith_rl.errors import ConfigError, config_error, foreign_code


class ChatMessage(TypedDict):
    """One message of a conversation."""

    role: str
    """"system", "user", "assistant" or "tool"."""
    content: str | list[dict[str, Any]]
    """A text, or parts of type "text", "image" and "image_url"."""


@dataclass(frozen=True)
class Prompt:
    """The task of an episode. All episodes of a group have the same prompt.

    Example: Prompt(seed=12), or
    Prompt(seed=0, messages=({"role": "user", "content": "2 + 2 ="},), fields={"answer": "4"})
    """

    seed: int = 0
    """Everything random in the episode is derived from it."""
    messages: tuple[ChatMessage, ...] = ()
    """The first messages, for environments that take their episodes from a data set."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data set's row, such as the right answer."""


class Step(NamedTuple):
    """An environment's reply to an answer of the model."""

    observations: list[ChatMessage]
    """The next messages; may be empty if `done`."""
    reward: float
    done: bool
    metadata: Mapping[str, Any] = {}
    """Anything worth knowing about the step."""


class Env(ABC):
    """One episode.

    Methods may be slow or async, and may raise: an exception is logged and ends this episode, not the run.
    """

    @abstractmethod
    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Begin the episode of `prompt`. Returns the first messages that the model sees, and metadata for the log."""

    @abstractmethod
    def step(self, text: str) -> Step:
        """Reply to an answer. `text` is what the model sampled, without the token that ended its turn."""

    def close(self) -> None:
        """Release what the episode holds. Called once, also after an error."""
        return

    def metrics(self) -> dict[str, float]:
        """Numbers about the finished episode. Logs and evaluations show their means."""
        return {}


class Teacher(ABC):
    """An environment that knows a right answer at every turn. Supervised warm-up learns from these answers."""

    @abstractmethod
    def demonstrate(self) -> str:
        """A right answer to the last message."""


def user(*parts: Any) -> ChatMessage:
    """A user's message of texts and images."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    return {
        "role": "user",
        "content": [text_part(part) if isinstance(part, str) else image_part(part) for part in parts],
    }


def text_part(text: str) -> dict[str, Any]:
    """A text as a part of a message's content."""
    return {"type": "text", "text": text}


def image_part(image: Any) -> dict[str, Any]:
    """A part of a message's content: a PIL image, an array of uint8, the bytes of an image file, or a data URI."""
    return {"type": "image", "image": image}


def visible(text: str) -> str:
    """The answer without its reasoning: the text behind the last `</think>`, stripped of white space."""
    return text.rpartition("</think>")[2].strip()


def generator(prompt: Prompt, *salt: int) -> np.random.Generator:
    """The episode's random numbers. Different `salt` gives independent numbers of the same episode."""
    return np.random.default_rng([prompt.seed, *salt])


def choose(random: np.random.Generator, options: Sequence[str]) -> str:
    """One of the options, all with the same probability."""
    return options[int(random.integers(len(options)))]


Factory = Callable[..., Env]

_factories: dict[str, Factory | str] = {
    "arithmetic": "tinsmith_rl.envs.questions:Arithmetic",
    "color_square": "tinsmith_rl.envs.questions:ColorSquare",
    "digit_sum": "tinsmith_rl.envs.questions:DigitSum",
    "guess_number": "tinsmith_rl.envs.questions:GuessNumber",
    "maze2d": "tinsmith_rl.envs.maze2d:Maze2D",
}
"""Registered names. An import path is imported when an environment is first made."""


def register(name: str, factory: Factory | str) -> None:
    """Register `factory`, or its import path, as `name`. Raises ConfigError if the name is taken."""
    if name in _factories:
        raise ConfigError(f"environment {name!r} is registered already; deregister it first, or take another name")
    _factories[name] = factory


def deregister(name: str) -> None:
    """Remove a registered name. Raises ConfigError if there is no such name."""
    if name not in _factories:
        raise ConfigError(f"environment {name!r} is not registered; known are {', '.join(registered())}")
    del _factories[name]


def registered() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_factories))


def find(name: str) -> Factory:
    """The factory with this registered name or import path. Raises ConfigError if there is none."""
    factory = _factories.get(name, name)
    if not isinstance(factory, str):
        return factory
    module, separator, attribute = factory.rpartition(":")
    if not separator:
        raise ConfigError(
            f"env={name!r} is not registered; known are {', '.join(registered())}; or give an import path: "
            "package.module:Env, file.py:Env"
        )
    imported = _imported(module, name)
    found = getattr(imported, attribute, None) or _factories.get(attribute)  # a file may register its environments
    if found is None or isinstance(found, str):
        raise ConfigError(f"env={name!r}: {imported.__file__} has no {attribute!r}")
    return cast(Factory, found)


def _imported(module: str, env: str) -> ModuleType:
    """The module of this name, or in this file. Raises ConfigError if it cannot be imported.

    The working directory, or the file's, comes last in the import path: nothing there stands in for a package.
    """
    file = Path(module).absolute() if module.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"env={env!r}: there is no file {file}")
    directory = str(Path.cwd() if file is None else file.parent)
    if directory not in sys.path:
        sys.path.append(directory)

    def not_imported(error: BaseException) -> ConfigError:
        raised = traceback.extract_tb(error.__traceback__)[-1]
        # <...>: the import itself
        where = "" if raised.filename.startswith("<") else f" ({raised.filename}, line {raised.lineno})"
        return ConfigError(f"env={env!r}: cannot import {module!r}: {type(error).__name__}: {error}{where}")

    with foreign_code(not_imported):
        imported = importlib.import_module(module if file is None else file.stem)
    if file is not None and Path(imported.__file__ or "").resolve() != file.resolve():
        raise ConfigError(f"env={env!r}: {file} has the name of another module, {imported.__file__}; rename it")
    return imported


@cache
def _signature(factory: Factory) -> inspect.Signature:
    return inspect.signature(factory)


def make(name: str, **options: Any) -> Env:
    """A new environment. Raises ConfigError for an unknown name, and for options that the environment does not take."""
    factory = find(name)
    signature = _signature(factory)
    with config_error(
        f"env={name!r} does not take these options {options!r}", TypeError, remedy=f"it takes {signature}"
    ):
        signature.bind(**options)
    return factory(**options)
