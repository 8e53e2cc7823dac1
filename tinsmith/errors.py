"""The one family of exceptions. Each is raised where the fault is found; `server/replies.py` turns it into a reply.

A message names the field, the value and what to do about it.
"""

from typing import ClassVar, Literal

_MAX_MESSAGE = 2000
"""Characters. A message quotes what a client sent, which may be as long as a body."""


class TinsmithError(Exception):
    """Root of the family. `category` is what the SDK sees in a failed future: "user" or "server"."""

    category: ClassVar[Literal["user", "server"]] = "server"

    def __str__(self) -> str:
        """The message; of a very long one the beginning and the end, where field and remedy are."""
        message = super().__str__()
        if len(message) <= _MAX_MESSAGE:
            return message
        half = _MAX_MESSAGE // 2
        return f"{message[:half]} ... ({len(message) - 2 * half} characters left out) ... {message[-half:]}"


class UserError(TinsmithError):
    """The request is wrong, and sending it again will not help (a failed future, or HTTP 400)."""

    category = "user"


class NotFoundError(UserError):
    """What the request names does not exist, or no longer does (HTTP 404)."""


class NotBuiltError(UserError):
    """The request asks for a part of the Tinker API that this version does not have (HTTP 400, or a failed future)."""


class ConfigError(TinsmithError):
    """A knob has a value that cannot work. The process that reads it does not start."""


class BackpressureError(TinsmithError):
    """Too much work is waiting; the same request succeeds later (HTTP 429)."""


class EngineUnavailableError(TinsmithError):
    """The engine process is starting, restarting or gone (HTTP 503, or a failed future of category "server")."""
