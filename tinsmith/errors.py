"""The exceptions of this package. They are raised where the fault is found, and `server/replies.py` turns them into HTTP replies.

A message names the field, its value and what to do about it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from reprlib import Repr
from typing import Any, ClassVar, Literal

_MAX_MESSAGE = 2000
"""Maximum length of a message in characters. Without it, a message that quotes a request could be as long as the request."""

_SHOWN_CHARACTERS = 120

_QUOTING = Repr()
_QUOTING.maxstring = _QUOTING.maxother = _QUOTING.maxlong = _SHOWN_CHARACTERS


class TinsmithError(Exception):
    """Base of all of them. `category` is what the SDK sees in a failed future: "user" or "server"."""

    category: ClassVar[Literal["user", "server"]] = "server"

    def __init__(self, message: str) -> None:
        """A message that is too long loses its middle: the beginning names the field, the end the remedy."""
        super().__init__(shortened(message))


def shortened(message: str, most: int = _MAX_MESSAGE) -> str:
    """A message of more than `most` characters without its middle."""
    if len(message) <= most:
        return message
    half = most // 2
    return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"


def printable(text: str) -> str:
    """`text` with escapes in place of control characters, of line breaks, and of what turns the direction of writing."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def quoted(value: object) -> str:
    """The `repr` of a value that a client sent, shortened for a message. It costs little even for a very large value."""
    shown = _QUOTING.repr(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."


@contextmanager
def translated(
    theirs: type[Exception] | tuple[type[Exception], ...], ours: type[TinsmithError], say: Callable[[Any], str]
) -> Iterator[None]:
    """Turn errors of a library or the operating system into one of ours, with the message that `say` makes of them."""
    try:
        yield
    except theirs as error:
        raise ours(say(error)) from error


class UserError(TinsmithError):
    """The request is wrong; sending it again will not help (a failed future, or HTTP 400)."""

    category = "user"


class NotFoundError(UserError):
    """The request names something that does not exist, or no longer exists (HTTP 404)."""


class NotBuiltError(UserError):
    """The request uses a part of the Tinker API that this version does not implement (HTTP 400, or a failed future)."""


class GivenUpError(UserError):
    """Nobody waits for the work any more: it ends in the middle. What is left of it is never stepped with."""


class ConfigError(TinsmithError):
    """A setting has a value that cannot work, or a file that is needed cannot be used. A program that finds this does not start."""


class BackpressureError(TinsmithError):
    """Too much work is waiting; the same request may succeed later (HTTP 429)."""


class DeviceLostError(TinsmithError):
    """A device no longer computes anything in this process. The process must end, and is restarted."""


class WorkersLostError(DeviceLostError):
    """The other workers cannot be reached any more: one of them has ended. The process must end too."""


class StoreUnavailableError(TinsmithError):
    """The database cannot be read or written at the moment: it is locked, or its disk is full or broken. Nothing was changed (HTTP 503)."""


class EngineUnavailableError(TinsmithError):
    """The engine process is starting, restarting, or has ended (HTTP 503, or a failed future of category "server")."""
