"""Environments by name, so that a configuration file can say `env: maze2d`.

A name stands for a factory: a class or function that returns a new `Env`, or the import path of one ("package.module:Name"), which is
imported when it is first made. A configuration may also use such a path directly, without registering anything.
"""

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from tinsmith.errors import ConfigError
from tinsmith.rl.env import Env

Factory = Callable[..., Env]

_factories: dict[str, Factory | str] = {
    "arithmetic": "tinsmith.rl.envs.arithmetic:Arithmetic",
    "color_square": "tinsmith.rl.envs.color_square:ColorSquare",
    "digit_sum": "tinsmith.rl.envs.digit_sum:DigitSum",
    "guess_number": "tinsmith.rl.envs.guess_number:GuessNumber",
    "maze2d": "tinsmith.rl.envs.maze2d:Maze2D",
}


def register(name: str, factory: Factory | str) -> None:
    """Let `name` stand for `factory`. Raises ConfigError if the name is taken."""
    if name in _factories:
        raise ConfigError(f"environment {name!r} is registered already; deregister it first, or take another name")
    _factories[name] = factory


def deregister(name: str) -> None:
    """Forget a name. Raises ConfigError if it is not known."""
    if name not in _factories:
        raise ConfigError(f"environment {name!r} is not registered; known are {', '.join(list())}")
    del _factories[name]


def list() -> tuple[str, ...]:
    """All registered names, sorted."""
    return tuple(sorted(_factories))


def find(name: str) -> Factory:
    """The factory of a registered name or of an import path. Raises ConfigError if there is none."""
    factory = _factories.get(name, name)
    if not isinstance(factory, str):
        return factory
    module, separator, attribute = factory.partition(":")
    if not separator:
        raise ConfigError(f"env={name!r} is not registered; known are {', '.join(list())}; or give an import path: package.module:Env")
    try:
        found: Factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env={name!r}: cannot import {factory!r}: {error}") from error
    return found


@cache
def _signature(factory: Factory) -> inspect.Signature:
    return inspect.signature(factory)


def make(name: str, **options: Any) -> Env:
    """A new environment. Raises ConfigError: an unknown name, or options that the environment does not take."""
    factory = find(name)
    signature = _signature(factory)
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"env={name!r} does not take these options {options!r}: {error}; it takes {signature}") from error
    return factory(**options)
