"""The one family of exceptions. Each is raised where the fault is found; `server/replies.py` turns it into a reply.

A message names the field, the value and what to do about it.
"""

from reprlib import Repr
from typing import ClassVar, Literal

_MAX_MESSAGE = 2000
"""Characters. A message quotes what a client sent, which may be as long as a body."""

_SHOWN_CHARACTERS = 120

_QUOTING = Repr()
_QUOTING.maxstring = _QUOTING.maxother = _QUOTING.maxlong = _SHOWN_CHARACTERS


class TinsmithError(Exception):
    """Root of the family. `category` is what the SDK sees in a failed future: "user" or "server"."""

    category: ClassVar[Literal["user", "server"]] = "server"

    def __init__(self, message: str) -> None:
        """Of a very long message the beginning and the end are kept, where field and remedy are."""
        super().__init__(_cut(message))


def _cut(message: str) -> str:
    if len(message) <= _MAX_MESSAGE:
        return message
    half = _MAX_MESSAGE // 2
    return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"


def quoted(value: object) -> str:
    """What a client sent, for a message: its representation, shortened. A value of any size is quoted in no time."""
    shown = _QUOTING.repr(value)
    return shown if len(shown) <= _SHOWN_CHARACTERS else shown[:_SHOWN_CHARACTERS] + "..."


class UserError(TinsmithError):
    """The request is wrong, and sending it again will not help (a failed future, or HTTP 400)."""

    category = "user"


class NotFoundError(UserError):
    """What the request names does not exist, or no longer does (HTTP 404)."""


class NotBuiltError(UserError):
    """The request asks for a part of the Tinker API that this version does not have (HTTP 400, or a failed future)."""


class ConfigError(TinsmithError):
    """A setting has a value that cannot work, or a file that is needed cannot be used. Who finds that at the start does not start."""


class BackpressureError(TinsmithError):
    """Too much work is waiting; the same request succeeds later (HTTP 429)."""


class DeviceLostError(TinsmithError):
    """A device computes nothing any more in this process. It ends the engine, which the server restarts."""


class StoreUnavailableError(TinsmithError):
    """The database takes or gives nothing at the moment: it is locked, its disk is full or fails. Nothing was changed (HTTP 503)."""


class EngineUnavailableError(TinsmithError):
    """The engine process is starting, restarting or gone (HTTP 503, or a failed future of category "server")."""
