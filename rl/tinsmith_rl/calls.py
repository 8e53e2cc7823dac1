"""Calls into an environment's code: what it raises, what it returns, and how often it fails.

The code is the user's. Every exception becomes an `EnvError`, and every returned value is checked before anything else
uses it: a reward of None or a message without a role would otherwise fail far away, in an error that names neither the
environment nor the method. A few failed episodes are dropped without harm. If most episodes fail, their rewards say
nothing about the model, and `FailureCounter` ends the run.
"""

import inspect
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from tinsmith_rl.env import ChatMessage, Step, Teacher, image_part
from tinsmith_rl.errors import ConfigError, RlError, UserError, foreign_code, translated
from tinsmith_rl.images import encode

if TYPE_CHECKING:  # the processes of environments import this module, and trajectories would bring the SDK along
    from tinsmith_rl.trajectory import Trajectory

log = logging.getLogger(__name__)

MIN_EPISODES = 64
"""The fewest episodes over which the share of failures is judged, so that two in a small batch end no run."""

_MAX_QUOTED = 200
"""Characters of a wrong value that an error quotes."""
_STEP = "a step is (observations, reward, done) or (observations, reward, done, metadata)"
_MESSAGE = "a message is a dictionary with a role and a content, which is a text or a list of parts"
_PARTS = "a part has type text with a text, image with an image, or image_url with an image_url that holds a url"


class EnvError(RlError):
    """An environment raised an exception or returned a wrong value. The message says which."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details or message
        """The traceback, if the environment raised."""


class TooManyFailuresError(RlError):
    """An environment failed so often that the run ends."""


def call(env: Any, method: str, *arguments: Any) -> Any:
    """Call a method of an environment.

    Returns its value, checked, with Python's own numbers; of an async method, an awaitable of that.

    Raises EnvError, and ConfigError for a demonstration of an environment that is no `Teacher`.
    """
    if method == "demonstrate" and not isinstance(env, Teacher):
        raise ConfigError(
            f"warmup: steps: {type(env).__qualname__} has no demonstrations; derive it from Teacher, or set steps=0"
        )
    with environment_code():
        value = getattr(env, method)(*arguments)
        return _checked_later(env, method, value) if inspect.isawaitable(value) else _checked(env, method, value)


async def _checked_later(env: Any, method: str, value: Awaitable[Any]) -> Any:
    with environment_code():
        return _checked(env, method, await value)


def _checked(env: Any, method: str, value: Any) -> Any:
    check = _CHECKS.get(method)
    return value if check is None else check(f"{type(env).__qualname__}.{method}", value)


def environment_code(*others: type[Exception]) -> AbstractContextManager[None]:
    """Turn every exception of the body, an environment's code, into an EnvError, except those of types `others`."""
    return foreign_code(env_error, EnvError, *others)


def env_error(error: BaseException) -> EnvError:
    """The EnvError for an exception that an environment raised."""
    # One without end is deep
    return EnvError(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error, limit=-30)))


def checked_reward(where: str, value: Any) -> float:
    """The reward as a float.

    Raises EnvError unless it is a finite number; `where` names the class and method that returned it.
    """
    return _number(f"{where} returned the reward", value)


class FailureCounter:
    """Counts failed episodes: the environment raised, returned a wrong value or took too long.

    The first failure is logged with its traceback, later ones as a number. A run ends when the environment fails in
    more than `max_share` of the episodes, or in every episode of `max_groups` groups in a row.
    """

    def __init__(self, env: str, max_share: float, max_groups: int) -> None:
        self.env, self.max_share, self.max_groups = env, max_share, max_groups
        self.failed = 0
        """Failed episodes in all."""
        self._first = ""
        self._failed_groups_in_a_row = 0
        self._episodes = self._failed_episodes = 0  # since the share was last judged
        self._reported = 0

    def count(self, group: "Sequence[Trajectory]") -> None:
        """Count a finished group.

        Raises TooManyFailuresError after `max_groups` groups in a row in which every episode failed.
        """
        failed = [trajectory for trajectory in group if trajectory.failed]
        if failed and not self._first:
            first = failed[0]
            self._first = first.error
            which = (
                f"seed {first.episode.seed}, group {first.episode.group}, member {first.episode.member}, "
                f"turn {first.turns}"
            )
            log.error(
                "environment %r failed in an episode (%s; %s):\n%s",
                self.env,
                first.stop_reason,
                which,
                first.details.rstrip(),
            )
        self.failed += len(failed)
        self._episodes += len(group)
        self._failed_episodes += len(failed)
        self._failed_groups_in_a_row = self._failed_groups_in_a_row + 1 if len(failed) == len(group) else 0
        if self._failed_groups_in_a_row >= self.max_groups:
            raise self._too_many(
                f"in every episode of {self._failed_groups_in_a_row} groups in a row",
                "max_failed_groups",
                self.max_groups,
            )

    def judge(self, min_episodes: int = MIN_EPISODES) -> None:
        """Log how many episodes failed since the last call; judge their share once there are `min_episodes`.

        Raises TooManyFailuresError if the share is too large.
        """
        if self.failed > self._reported:
            log.warning(
                "environment %r failed in %d more episodes, %d in all",
                self.env,
                self.failed - self._reported,
                self.failed,
            )
            self._reported = self.failed
        if self._episodes < min_episodes:
            return
        if self._failed_episodes > self.max_share * self._episodes:
            raise self._too_many(
                f"in {self._failed_episodes} of {self._episodes} episodes", "max_failed_share", self.max_share
            )
        self._episodes = self._failed_episodes = 0

    def _too_many(self, how_often: str, setting: str, limit: float) -> TooManyFailuresError:
        remedy = f"repair it, or raise env: {setting}={limit:g}"
        return TooManyFailuresError(
            f"environment {self.env!r} failed {how_often}; {remedy}; the first failure was {self._first}"
        )


def _opening(where: str, value: Any) -> tuple[list[ChatMessage], dict[str, Any]]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise EnvError(f"{where} returned {_quoted(value)}; it returns (messages, metadata)")
    messages = _messages(where, "messages", value[0])
    if not messages:
        raise EnvError(f"{where} returned no messages; the model needs one to answer")
    return messages, _metadata(where, value[1])


def _step(where: str, value: Any) -> Step:
    if not isinstance(value, tuple | list) or len(value) not in (3, 4):
        raise EnvError(f"{where} returned {_quoted(value)}; {_STEP}")
    step = Step(*value)
    observations = _messages(where, "observations", step.observations)
    reward = checked_reward(where, step.reward)
    done = _plain(step.done)
    if not isinstance(done, bool):
        raise EnvError(f"{where} returned {_quoted(step.done)} for done, which is True or False")
    return Step(observations, reward, done, _metadata(where, step.metadata))


def _metrics(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise EnvError(f"{where} returned {_quoted(value)}; metrics are a dictionary of numbers by name")
    return {name: _number(f"{where} returned {name}=", number) for name, number in value.items()}


def _demonstration(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise EnvError(f"{where} returned {_quoted(value)}; a demonstration is a text")
    return _text(where, "its demonstration", value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "init": _opening,
    "step": _step,
    "metrics": _metrics,
    "demonstrate": _demonstration,
}


def _messages(where: str, what: str, value: Any) -> list[ChatMessage]:
    """The messages, with each image as an `ImageFile`."""
    if not isinstance(value, list | tuple):
        raise EnvError(f"{where} returned {_quoted(value)} for its {what}, which are a list of messages")
    return [_message(where, f"{what}[{place}]", message) for place, message in enumerate(value)]


def _message(where: str, place: str, message: Any) -> ChatMessage:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str | list | tuple) or not isinstance(message.get("role"), str):
        raise EnvError(f"{where} returned {place}={_quoted(message)}; {_MESSAGE}")
    parts = (
        _text(where, place, content) if isinstance(content, str) else [_part(where, place, part) for part in content]
    )
    return cast(ChatMessage, {**message, "content": parts})


def _part(where: str, place: str, part: Any) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {**part, "text": _text(where, place, text)}
        case {"type": "image", "image": image} | {"type": "image_url", "image_url": {"url": image}}:
            with translated(
                UserError, lambda why: EnvError(f"{where} returned an image in {place} that cannot be shown: {why}")
            ):
                return image_part(encode(image))
    raise EnvError(f"{where} returned {_quoted(part)} in {place}; {_PARTS}")


def _text(where: str, place: str, text: str) -> str:
    if text.encode(errors="ignore").decode() != text:  # it has surrogates, which Python makes of bytes that are no text
        raise EnvError(f"{where} returned a text in {place} that is not Unicode: {_quoted(text)}")
    return text


def _metadata(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise EnvError(f"{where} returned {_quoted(value)} for its metadata, which are a dictionary")
    return dict(value)


def _number(what: str, value: Any) -> float:
    plain = _plain(value)
    # This comparison also rejects NaN, infinity and integers that no float can hold.
    if isinstance(plain, int | float) and abs(plain) <= sys.float_info.max:
        return float(plain)
    separator = "" if what.endswith("=") else " "
    raise EnvError(f"{what}{separator}{_quoted(value)}, which is not a finite number")


def _plain(value: Any) -> Any:
    """A scalar of numpy or torch as Python's own number; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def _quoted(value: Any) -> str:
    return f"{value!r:.{_MAX_QUOTED}}"
