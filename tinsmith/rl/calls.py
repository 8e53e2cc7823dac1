"""Calls of an environment: whatever it raises becomes an `EnvError`, and what it returns is checked before anything else sees it.

An environment is somebody's program. A reward of None or a message without a role would otherwise fail far from where it was made, in an
error that names neither the environment nor the method.
"""

import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith.errors import TinsmithError
from tinsmith.rl.env import Message, Step

_SHOWN = 200
"""Characters of a wrong value that an error quotes."""
_STEP = "a step is (observations, reward, done) or (observations, reward, done, metadata)"
_MESSAGE = "a message is a dictionary with a role and a content, which is a text or a list of parts"
_PARTS = "a part has type text with a text, image with an image, or image_url with an image_url that holds a url"


class EnvError(TinsmithError):
    """An environment raised, or returned what it may not; the message says what."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details or message
        """The whole traceback, if the environment raised."""


def call(env: Any, method: str, *arguments: Any) -> Any:
    """What the environment's method returns, checked and with plain numbers. Raises EnvError."""

    def checked() -> Any:
        value = getattr(env, method)(*arguments)
        check = _CHECKS.get(method)
        return value if check is None else check(f"{type(env).__qualname__}.{method}", value)

    return guarded(checked)


def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """The value of a function that runs somebody's program. Raises EnvError."""
    try:
        return function(*arguments)
    except EnvError:
        raise
    except (Exception, SystemExit) as error:  # it ends the episode, and is reported there
        raise env_error(error) from error


def env_error(error: BaseException) -> EnvError:
    """What an environment raised, as the reason why an episode ended."""
    return EnvError(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


def checked_reward(where: str, value: Any) -> float:
    """The reward as a float; `where` is the class and the method that returned it. Raises EnvError unless it is a finite number."""
    return _number(f"{where} returned the reward", value)


def _opening(where: str, value: Any) -> tuple[list[Message], dict[str, Any]]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise EnvError(f"{where} returned {_shown(value)}; it returns (messages, metadata)")
    messages = _messages(where, "messages", value[0])
    if not messages:
        raise EnvError(f"{where} returned no messages; the model needs one to answer")
    return messages, _metadata(where, value[1])


def _step(where: str, value: Any) -> Step:
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        raise EnvError(f"{where} returned {_shown(value)}; {_STEP}")
    step = Step(*value)
    observations = _messages(where, "observations", step.observations)
    reward = checked_reward(where, step.reward)
    done = _plain(step.done)
    if not isinstance(done, bool):
        raise EnvError(f"{where} returned {_shown(step.done)} for done, which is True or False")
    return Step(observations, reward, done, _metadata(where, step.metadata))


def _metrics(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise EnvError(f"{where} returned {_shown(value)}; metrics are a dictionary of numbers by name")
    return {name: _number(f"{where} returned {name}=", number) for name, number in value.items()}


def _demonstration(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{where} returned {_shown(value)}; a demonstration is a text")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "init": _opening,
    "step": _step,
    "metrics": _metrics,
    "demonstrate": _demonstration,
}


def _messages(where: str, what: str, value: Any) -> list[Message]:
    if not isinstance(value, list | tuple):
        raise EnvError(f"{where} returned {_shown(value)} for its {what}, which are a list of messages")
    for place, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise EnvError(f"{where} returned {what}[{place}]={_shown(message)}; {_MESSAGE}")
        content = message.get("content")
        if not isinstance(content, str | list | tuple):
            raise EnvError(f"{where} returned {what}[{place}]={_shown(message)}; {_MESSAGE}")
        for part in () if isinstance(content, str) else content:
            if not _is_part(part):
                raise EnvError(f"{where} returned {_shown(part)} in {what}[{place}]; {_PARTS}")
    return list(value)


def _is_part(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str()} | {"type": "image", "image": _} | {"type": "image_url", "image_url": {"url": _}}:
            return True
    return False


def _metadata(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvError(f"{where} returned {_shown(value)} for its metadata, which are a dictionary")
    return dict(value)


def _number(what: str, value: Any) -> float:
    plain = _plain(value)
    # Neither NaN nor infinity, nor a whole number beyond every float.
    if isinstance(plain, int | float) and abs(plain) <= sys.float_info.max:
        return float(plain)
    separator = "" if what.endswith("=") else " "
    raise EnvError(f"{what}{separator}{_shown(value)}, which is not a finite number")


def _plain(value: Any) -> Any:
    """A number of numpy or torch, or an array that is one, as Python's own."""
    return value.item() if getattr(value, "shape", None) == () else value


def _shown(value: Any) -> str:
    return f"{value!r:.{_SHOWN}}"
