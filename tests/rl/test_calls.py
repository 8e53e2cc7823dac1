"""What an environment raises or wrongly returns is an error that names class, method and value; too many failures end
the run.

Invariant: A wrong value of an RL environment is named by class, method and value; too many failures end the run.
"""

import base64
import logging
import pickle
from pathlib import Path
from traceback import format_exception_only
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from tests.running import tinsmith_here
from tinsmith_rl.calls import EnvError, FailureCounter, TooManyFailuresError, call
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.env import Env, Prompt, Step, Teacher, image_part, user
from tinsmith_rl.errors import UserError
from tinsmith_rl.images import encode
from tinsmith_rl.trajectory import EpisodeId, StopReason, Trajectory


class Returns(Env, Teacher):
    """Returns one thing from every method, or raises it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _given(self, *_: Any) -> Any:
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value

    init = step = metrics = demonstrate = close = cast(Any, _given)


ARGUMENTS: dict[str, tuple[Any, ...]] = {"init": (Prompt(),), "step": ("up",)}
STEP = "; a step is (observations, reward, done) or (observations, reward, done, metadata)"
MESSAGE = "; a message is a dictionary with a role and a content, which is a text or a list of parts"
PARTS = "; a part has type text with a text, image with an image, or image_url with an image_url that holds a url"
SOUND = {"role": "user", "content": [{"type": "audio", "audio": 3}]}
NO_IMAGE = (
    "that cannot be shown: an image of 8 bytes that begins with b'no image' is no image file that Pillow can read"
)


@pytest.mark.parametrize(
    ("method", "value", "complaint"),
    [
        ("init", None, "None; it returns (messages, metadata)"),
        ("init", ("hi", {}), "'hi' for its messages, which are a list of messages"),
        ("init", ([], {}), "no messages; the model needs one to answer"),
        ("init", ([user("hi")], None), "None for its metadata, which are a dictionary"),
        ("init", (["hi"], {}), f"messages[0]='hi'{MESSAGE}"),
        ("step", ([], 1.0), f"([], 1.0){STEP}"),
        *(
            ("step", ([], reward, True), f"the reward {repr(reward)[:200]}, which is not a finite number")
            for reward in (None, -float("inf"), "1", float("nan"), np.array([1.0]), "x" * 5000)
        ),
        *(("step", ([], 1.0, done), f"{done} for done, which is True or False") for done in (None, 1)),
        ("step", ([user("a"), SOUND], 0.0, False), f"{{'type': 'audio', 'audio': 3}} in observations[1]{PARTS}"),
        ("step", ([user("a", "\udcff")], 0.0, False), "a text in observations[0] that is not Unicode: '\\udcff'"),
        ("step", ([user("a"), user(b"no image")], 0.0, False), f"an image in observations[1] {NO_IMAGE}"),
        ("metrics", None, "None; metrics are a dictionary of numbers by name"),
        ("metrics", {"found": "yes"}, "found='yes', which is not a finite number"),
        ("demonstrate", None, "None; a demonstration is a text"),
    ],
)
def test_a_wrong_return_value_is_named(method: str, value: Any, complaint: str) -> None:
    with pytest.raises(EnvError) as raised:
        call(Returns(value), method, *ARGUMENTS.get(method, ()))
    assert str(raised.value) == raised.value.details == f"Returns.{method} returned {complaint}"


def test_right_values_come_as_plain_ones() -> None:
    file = encode(Image.new("RGB", (4, 4)))
    uri = f"data:image/png;base64,{base64.b64encode(file.data).decode()}"
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": file.data},
        {"type": "image_url", "image_url": {"url": uri}},
    ]
    given: list[Any] = [user("a"), {"role": "tool", "content": parts, "name": "compass"}]
    messages: list[Any] = [
        user("a"),
        {"role": "tool", "content": [parts[0], image_part(file), image_part(file)], "name": "compass"},
    ]
    assert call(Returns((given, {"a": 1})), "init", Prompt()) == (messages, {"a": 1})
    for reward, done in ((1, True), (True, np.True_), (np.float32(1), np.array(True)), (np.array(1), True)):
        step = call(Returns((messages, reward, done)), "step", "up")
        assert step == Step(messages, 1.0, True, {})
        assert (type(step.reward), type(step.done)) == (float, bool)
    assert call(Returns({"found": np.int64(3)}), "metrics") == {"found": 3.0}
    assert call(Returns("nothing to check"), "close") == "nothing to check"


@pytest.mark.parametrize("error", [KeyError("lost"), SystemExit("enough"), UserError("the door is locked")])
def test_what_it_raises_comes_with_the_whole_traceback(error: BaseException) -> None:
    with pytest.raises(EnvError) as raised:
        call(Returns(error), "step", "up")
    assert str(raised.value) == f"{type(error).__name__}: {error}"
    assert raised.value.details.startswith("Traceback (most recent call last):\n")
    assert raised.value.details.endswith(f"in _given\n    raise self.value\n{format_exception_only(error)[0]}")
    travelled = pickle.loads(pickle.dumps(raised.value))  # as from a worker process
    assert (str(travelled), travelled.details) == (str(raised.value), raised.value.details)


def failing(*groups: str, **limits: Any) -> FailureCounter:
    """A counter after groups of episodes, each a letter: done, error or late."""
    failures = FailureCounter("maze", **{"max_share": 0.5, "max_groups": 8, **limits})
    reasons: dict[str, StopReason] = {"d": "done", "e": "env_error", "l": "env_timeout"}
    error, details = "KeyError: 'lost'", "the model said: 'up'\nTraceback\nKeyError: 'lost'"
    for group in groups:
        failures.count(
            [
                Trajectory(EpisodeId("maze", 7, 3, 1), (), reasons[each], 2, error=error, details=details)
                for each in group
            ]
        )
        failures.judge()
    return failures


def test_the_first_traceback_is_printed_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    failing("del", "dde", "dd")
    where = "environment 'maze' failed in an episode (env_error; seed 7, group 3, member 1, turn 2):"
    assert caplog.messages == [
        f"{where}\nthe model said: 'up'\nTraceback\nKeyError: 'lost'",
        "environment 'maze' failed in 2 more episodes, 2 in all",
        "environment 'maze' failed in 1 more episodes, 3 in all",
    ]


@pytest.mark.parametrize(
    ("groups", "limits", "said", "setting"),
    [
        (["dee", "d" * 31 + "e" * 30, "d" * 31 + "l" * 33], {}, "failed in 33 of 64 episodes", "max_failed_share=0.5"),
        (
            ["ee", "ed", "e", "el"],
            {"max_share": 1.0, "max_groups": 2},
            "failed in every episode of 2 groups in a row",
            "max_failed_groups=2",
        ),
    ],
)
def test_too_many_failures_end_the_run(groups: list[str], limits: dict[str, Any], said: str, setting: str) -> None:
    """Of few episodes no share tells anything, and half of many is accepted."""
    failing(*groups[:-1], **limits)
    with pytest.raises(TooManyFailuresError) as raised:
        failing(*groups, **limits)
    remedy = f"repair it, or raise env: {setting}; the first failure was KeyError: 'lost'"
    assert str(raised.value) == f"environment 'maze' {said}; {remedy}"


@pytest.mark.parametrize(("command", "episodes"), [("rl", 8), ("eval", 4)])
def test_an_environment_that_always_raises_ends_the_command(
    command: str, episodes: int, server_url: str, plain: ChatTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"server: {{url: '{server_url}', api_key: tml-test}}\n"
        f"model: {{base_model: tiny, tokenizer: {plain.tokenizer.name_or_path}}}\n"
        f"env: {{name: 'tests.rl.moody:Absent'}}\ntraining: {{steps: 2, groups: 2, group_size: 2}}\nevaluation: "
        f"{{prompts: 4}}\n"
        f"output: {{directory: {tmp_path / 'out'}}}\n"
    )
    caplog.set_level(logging.WARNING)
    ran = tinsmith_here(command, str(file))
    remedy = (
        "repair it, or raise env: max_failed_share=0.5; the first failure was ConnectionError: the simulator is busy"
    )
    failed = f"environment 'tests.rl.moody:Absent' failed in {episodes} of {episodes} episodes"
    assert (ran.returncode, ran.stderr) == (2, f"tinsmith-rl: {failed}; {remedy}\n")
    assert "reward 0.000" not in ran.stdout
    (traceback,) = [message for message in caplog.messages if "Traceback" in message]
    assert traceback.endswith(
        '    raise ConnectionError("the simulator is busy")\nConnectionError: the simulator is busy'
    )
