"""The exceptions of this package, which `server/replies.py` turns into HTTP replies.

A message names the field, its value and what to do about it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from reprlib import Repr
from typing import Any, ClassVar, Literal

_MAX_MESSAGE = 2000
"""Most characters of a message, which may quote a request."""

_SHOWN_CHARACTERS = 120

_QUOTING = Repr()
_QUOTING.maxstring = _QUOTING.maxother = _QUOTING.maxlong = _SHOWN_CHARACTERS


class TinsmithError(Exception):
    """`category` is what the SDK sees in a failed future."""

    category: ClassVar[Literal["user", "server"]] = "server"

    def __init__(self, message: str) -> None:
        """A long message loses its middle: it begins with the field and ends with the remedy."""
        super().__init__(shortened(message))

    def __reduce__(self) -> tuple[Any, ...]:
        """Come out of a pickle as it is: `__init__` would shorten a message again, and other classes take more."""
        return _as_it_was, (type(self), self.args), vars(self)


def _as_it_was(kind: type[TinsmithError], args: tuple[Any, ...]) -> TinsmithError:
    return kind.__new__(kind, *args)


def shortened(message: str, most: int = _MAX_MESSAGE) -> str:
    """A message without its middle, if it has more than `most` characters."""
    if len(message) <= most:
        return message
    half = most // 2
    return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"


def printable(text: str) -> str:
    """`text` with escapes for control characters, line breaks, and what turns the direction of writing."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def quoted(value: object) -> str:
    """The `repr` of a client's value, shortened; cheap even for a very large value."""
    shown = _QUOTING.repr(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."


@contextmanager
def translated(
    theirs: type[Exception] | tuple[type[Exception], ...], ours: type[TinsmithError], say: Callable[[Any], str]
) -> Iterator[None]:
    """Turn errors of a library into one of ours, with the message that `say` makes of them."""
    try:
        yield
    except theirs as error:
        raise ours(say(error)) from error


@dataclass(frozen=True, slots=True)
class Reported:
    """A context that gives errors of types `theirs` to `report` instead of raising them, except `passing` ones.

    From Python 3.12 on, a context that a generator makes would keep an error that it suppresses, and with it the
    tensors of a failed pass, until garbage is collected.
    """

    theirs: type[Exception] | tuple[type[Exception], ...]
    report: Callable[[Any], object]
    passing: tuple[type[Exception], ...] = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool | None:
        if not isinstance(error, self.theirs) or isinstance(error, self.passing):
            return False
        self.report(error)
        return True


def reported(theirs: type[Exception] | tuple[type[Exception], ...], report: Callable[[Any], object]) -> Reported:
    """Give errors of these types to `report` instead of raising them."""
    return Reported(theirs, report)


@contextmanager
def located(where: Callable[[], str]) -> Iterator[None]:
    """Begin the message of an error with its place in the request, which `where` says."""
    try:
        yield
    except TinsmithError as error:
        raise type(error)(f"{where()}: {error}") from error


class UserError(TinsmithError):
    """The request is wrong; sending it again will not help (a failed future, or HTTP 400)."""

    category = "user"


class ParameterError(UserError):
    """A parameter of a request cannot be obeyed; the message begins with its name and a colon."""

    @property
    def parameter(self) -> str:
        """The name, with dots before its parts."""
        return str(self).partition(":")[0]


class NotFoundError(UserError):
    """The request names something that does not exist, or no longer exists (HTTP 404)."""


class NotBuiltError(UserError):
    """The request uses a part of the Tinker API that is not implemented (HTTP 400, or a failed future)."""


class GivenUpError(UserError):
    """Nobody waits for the work any more, so it ends in the middle; nothing of it is stepped with."""


class ConfigError(TinsmithError):
    """A setting cannot work, or a file that is needed cannot be used. The program does not start."""


class BackpressureError(TinsmithError):
    """Too much work is waiting, or a budget is used up; the same request may succeed later (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        """The client is to repeat the request after `retry_after_s` seconds."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeviceLostError(TinsmithError):
    """A device computes nothing any more in this process, which must end and is restarted."""


class WorkersLostError(DeviceLostError):
    """Another worker has ended, so this process must end too."""


class StoreUnavailableError(TinsmithError):
    """The database is locked, or its disk is full or broken. Nothing was changed (HTTP 503)."""


class EngineUnavailableError(TinsmithError):
    """The engine process is starting, restarting, or has ended (HTTP 503, or a failed future of category "server")."""
