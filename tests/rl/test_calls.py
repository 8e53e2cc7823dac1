"""What an environment raises or wrongly returns is an error that names its class, the method and the value."""

import pickle
from typing import Any

import numpy as np
import pytest

from tinsmith.rl.calls import EnvError, call
from tinsmith.rl.env import Env, Prompt, Step, user


class Returns(Env):
    """Returns one thing from every method."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def init(self, prompt: Prompt) -> Any:
        return self._given()

    def step(self, text: str) -> Any:
        return self._given()

    def metrics(self) -> Any:
        return self._given()

    def demonstrate(self) -> Any:
        return self._given()

    def close(self) -> Any:
        return self._given()

    def _given(self) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value


ARGUMENTS: dict[str, tuple[Any, ...]] = {"init": (Prompt(),), "step": ("up",), "metrics": (), "demonstrate": (), "close": ()}
STEP = "; a step is (observations, reward, done) or (observations, reward, done, metadata)"
MESSAGE = "; a message is a dictionary with a role and a content, which is a text or a list of parts"
PARTS = "; a part has type text with a text, image with an image, or image_url with an image_url that holds a url"


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("init", None, "Returns.init returned None; it returns (messages, metadata)"),
        ("init", [user("hi")], "Returns.init returned [{'role': 'user', 'content': 'hi'}]; it returns (messages, metadata)"),
        ("init", ("hi", {}), "Returns.init returned 'hi' for its messages, which are a list of messages"),
        ("init", ([], {}), "Returns.init returned no messages; the model needs one to answer"),
        ("init", ([user("hi")], None), "Returns.init returned None for its metadata, which are a dictionary"),
        ("init", (["hi"], {}), f"Returns.init returned messages[0]='hi'{MESSAGE}"),
        ("step", None, f"Returns.step returned None{STEP}"),
        ("step", ([], 1.0), f"Returns.step returned ([], 1.0){STEP}"),
        ("step", ([], None, True), "Returns.step returned the reward None, which is not a finite number"),
        ("step", ([], "1", True), "Returns.step returned the reward '1', which is not a finite number"),
        ("step", ([], float("nan"), True), "Returns.step returned the reward nan, which is not a finite number"),
        ("step", ([], -float("inf"), True), "Returns.step returned the reward -inf, which is not a finite number"),
        ("step", ([], np.array([1.0]), True), "Returns.step returned the reward array([1.]), which is not a finite number"),
        ("step", ([], 1.0, None), "Returns.step returned None for done, which is True or False"),
        ("step", ([], 1.0, 1), "Returns.step returned 1 for done, which is True or False"),
        ("step", ("hot", 1.0, True), "Returns.step returned 'hot' for its observations, which are a list of messages"),
        ("step", ([{"role": "user"}], 0.0, False), f"Returns.step returned observations[0]={{'role': 'user'}}{MESSAGE}"),
        (
            "step",
            ([user("a"), {"role": "user", "content": [{"type": "audio", "audio": 3}]}], 0.0, False),
            f"Returns.step returned {{'type': 'audio', 'audio': 3}} in observations[1]{PARTS}",
        ),
        ("step", ([], 1.0, True, None), "Returns.step returned None for its metadata, which are a dictionary"),
        ("metrics", None, "Returns.metrics returned None; metrics are a dictionary of numbers by name"),
        ("metrics", {"found": "yes"}, "Returns.metrics returned found='yes', which is not a finite number"),
        ("demonstrate", None, "Returns.demonstrate returned None; a demonstration is a text"),
    ],
)
def test_a_wrong_return_value_is_named(method: str, value: Any, message: str) -> None:
    with pytest.raises(EnvError) as raised:
        call(Returns(value), method, *ARGUMENTS[method])
    assert str(raised.value) == raised.value.details == message


def test_a_long_value_is_cut() -> None:
    with pytest.raises(EnvError) as raised:
        call(Returns(([], "x" * 5000, True)), "step", "up")
    assert str(raised.value) == f"Returns.step returned the reward '{'x' * 199}, which is not a finite number"


def test_right_values_come_as_plain_ones() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": b""}, {"type": "image_url", "image_url": {"url": "data:"}}]
    messages: list[Any] = [user("a"), {"role": "tool", "content": parts, "name": "compass"}]
    assert call(Returns((messages, {"a": 1})), "init", Prompt()) == (messages, {"a": 1})
    for reward, done in ((1, True), (True, np.True_), (np.float32(1), np.array(True)), (np.array(1), True)):
        step = call(Returns((messages, reward, done)), "step", "up")
        assert step == Step(messages, 1.0, True, {})
        assert (type(step.reward), type(step.done)) == (float, bool)
    assert call(Returns({"found": np.int64(3)}), "metrics") == {"found": 3.0}
    assert call(Returns("nothing to check"), "close") == "nothing to check"


@pytest.mark.parametrize("error", [KeyError("lost"), SystemExit("enough")])
def test_what_it_raises_comes_with_the_whole_traceback(error: BaseException) -> None:
    with pytest.raises(EnvError) as raised:
        call(Returns(error), "step", "up")
    assert str(raised.value) == f"{type(error).__name__}: {error}"
    assert raised.value.details.startswith("Traceback (most recent call last):\n")
    assert raised.value.details.endswith(f"in _given\n    raise self.value\n{type(error).__name__}: {error}\n")
    travelled = pickle.loads(pickle.dumps(raised.value))  # as from a worker process
    assert (str(travelled), travelled.details) == (str(raised.value), raised.value.details)
