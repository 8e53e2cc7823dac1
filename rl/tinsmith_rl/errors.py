"""The exceptions of this package, and how errors of other code become ours.

A message names the setting, its value and what to do about it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_MAX_MESSAGE = 2000
"""Most characters of a message, which may quote an environment or a server."""


class RlError(Exception):
    """The base of all errors of this package."""

    def __init__(self, message: str) -> None:
        """A long message loses its middle: it begins with the setting and ends with the remedy."""
        super().__init__(shortened(message))


class ConfigError(RlError):
    """A setting cannot work, or a file that is needed cannot be used."""


class UserError(RlError):
    """An environment, a prompt or an image cannot be used."""


def shortened(message: str, most: int = _MAX_MESSAGE) -> str:
    """A message without its middle, if it has more than `most` characters."""
    if len(message) <= most:
        return message
    half = most // 2
    return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"


def printable(text: str) -> str:
    """`text` with escapes for control characters, line breaks, and what turns the direction of writing."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@contextmanager
def translated(theirs: type[Exception] | tuple[type[Exception], ...], say: Callable[[Any], RlError]) -> Iterator[None]:
    """Turn errors of a library into the one of ours that `say` makes of them."""
    try:
        yield
    except theirs as error:
        raise say(error) from error


@contextmanager
def foreign_code(say: Callable[[BaseException], RlError], *others: type[Exception]) -> Iterator[None]:
    """Run code that may raise anything, such as an environment or a template.

    All but `others` becomes the error that `say` makes of it.
    """
    try:
        yield
    except others:
        raise
    except (Exception, SystemExit) as error:  # it must not end the program
        raise say(error) from error


def config_error(what: str, *errors: type[Exception], remedy: str = "") -> AbstractContextManager[None]:
    """Turn these errors into a ConfigError that says what they were about and what to do."""
    return translated(errors, lambda error: ConfigError(f"{what}: {error}{remedy and f'; {remedy}'}"))
