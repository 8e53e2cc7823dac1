"""What an environment raises or wrongly returns is an error that names class, method and value; too many failures end the run.

Invariant: A wrong value of an RL environment is named by class, method and value; too many failures end the run.
"""

import base64
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.running import tinsmith_here
from tinsmith.rl.calls import EnvError, FailureCounter, TooManyFailuresError, call
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.env import Env, Prompt, Step, Teacher, image_part, user
from tinsmith.rl.pictures import encode
from tinsmith.rl.trajectory import EpisodeId, StopReason, Trajectory


class Returns(Env, Teacher):
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
        ("init", ("hi", {}), "Returns.init returned 'hi' for its messages, which are a list of messages"),
        ("init", ([], {}), "Returns.init returned no messages; the model needs one to answer"),
        ("init", ([user("hi")], None), "Returns.init returned None for its metadata, which are a dictionary"),
        ("init", (["hi"], {}), f"Returns.init returned messages[0]='hi'{MESSAGE}"),
        ("step", ([], 1.0), f"Returns.step returned ([], 1.0){STEP}"),
        ("step", ([], None, True), "Returns.step returned the reward None, which is not a finite number"),
        ("step", ([], -float("inf"), True), "Returns.step returned the reward -inf, which is not a finite number"),
        ("step", ([], "1", True), "Returns.step returned the reward '1', which is not a finite number"),
        ("step", ([], float("nan"), True), "Returns.step returned the reward nan, which is not a finite number"),
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
        ("step", ([], "x" * 5000, True), f"Returns.step returned the reward '{'x' * 199}, which is not a finite number"),
        ("metrics", None, "Returns.metrics returned None; metrics are a dictionary of numbers by name"),
        ("metrics", {"found": "yes"}, "Returns.metrics returned found='yes', which is not a finite number"),
        (
            "init",
            ([{"role": "user", "content": "\ud800"}], {}),
            "Returns.init returned a text in messages[0] that is not Unicode: '\\ud800'",
        ),
        (
            "step",
            ([user("a", "\udcff")], 0.0, False),
            "Returns.step returned a text in observations[0] that is not Unicode: '\\udcff'",
        ),
        ("demonstrate", None, "Returns.demonstrate returned None; a demonstration is a text"),
        (
            "step",
            ([user("a"), user(b"no picture")], 0.0, False),
            (
                "Returns.step returned a picture in observations[1] that cannot be shown: a picture of 10 bytes that begins with "
                "b'no pictu' is no image file that Pillow can read"
            ),
        ),
    ],
)
def test_a_wrong_return_value_is_named(method: str, value: Any, message: str) -> None:
    with pytest.raises(EnvError) as raised:
        call(Returns(value), method, *ARGUMENTS[method])
    assert str(raised.value) == raised.value.details == message


def test_right_values_come_as_plain_ones() -> None:
    file = encode(Image.new("RGB", (4, 4)))
    uri = f"data:image/png;base64,{base64.b64encode(file.data).decode()}"
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": file.data}, {"type": "image_url", "image_url": {"url": uri}}]
    given: list[Any] = [user("a"), {"role": "tool", "content": parts, "name": "compass"}]
    messages: list[Any] = [user("a"), {"role": "tool", "content": [parts[0], image_part(file), image_part(file)], "name": "compass"}]
    assert call(Returns((given, {"a": 1})), "init", Prompt()) == (messages, {"a": 1})
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


def episodes(done: int = 0, env_error: int = 0, env_timeout: int = 0) -> list[Trajectory]:
    """A group in which so many episodes ended so."""
    error, details = "KeyError: 'lost'", "the model said: 'up'\nTraceback\nKeyError: 'lost'"
    counts: dict[StopReason, int] = {"done": done, "env_error": env_error, "env_timeout": env_timeout}
    reasons = [reason for reason, count in counts.items() for _ in range(count)]
    return [Trajectory(EpisodeId("maze", 7, 3, 1), (), reason, 2, error=error, details=details) for reason in reasons]


def test_the_first_traceback_is_printed_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureCounter("maze", max_share=0.5, max_groups=8)
    failures.count(episodes(done=1, env_error=1, env_timeout=1))
    failures.count(episodes(done=2, env_error=1))
    failures.judge()
    failures.count(episodes(done=2))
    failures.judge()
    assert [record.getMessage() for record in caplog.records] == [
        (
            "environment 'maze' failed in an episode (env_error; seed 7, group 3, member 1, turn 2):\n"
            "the model said: 'up'\nTraceback\nKeyError: 'lost'"
        ),
        "environment 'maze' failed in 3 more episodes, 3 in all",
    ]


def test_too_large_a_share_ends_the_run_once_there_are_enough_episodes() -> None:
    failures = FailureCounter("maze", max_share=0.5, max_groups=8)
    failures.count(episodes(done=1, env_error=2))
    failures.judge()  # 2 of 3 tell nothing yet
    failures.count(episodes(done=31, env_error=30))
    failures.judge()  # half of 64 is accepted
    failures.count(episodes(done=31, env_timeout=33))
    with pytest.raises(TooManyFailuresError) as raised:
        failures.judge()
    remedy = "repair it, or raise env: max_failed_share=0.5; the first failure was KeyError: 'lost'"
    assert str(raised.value) == f"environment 'maze' failed in 33 of 64 episodes; {remedy}"


def test_groups_in_a_row_end_the_run() -> None:
    failures = FailureCounter("maze", max_share=1.0, max_groups=2)
    for group in (episodes(env_error=2), episodes(env_error=1, done=1), episodes(env_error=1)):
        failures.count(group)
    with pytest.raises(TooManyFailuresError) as raised:
        failures.count(episodes(env_error=1, env_timeout=1))
    remedy = "repair it, or raise env: max_failed_groups=2; the first failure was KeyError: 'lost'"
    assert str(raised.value) == f"environment 'maze' failed in every episode of 2 groups in a row; {remedy}"


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_an_environment_that_always_raises_ends_the_command(
    command: str, server_url: str, plain: ChatTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"server: {{url: '{server_url}', api_key: tml-test}}\n"
        f"model: {{base_model: tiny, tokenizer: {plain.tokenizer.name_or_path}}}\n"
        f"env: {{name: 'tests.rl.moody:Absent'}}\ntraining: {{steps: 2, groups: 2, group_size: 2}}\nevaluation: {{prompts: 4}}\n"
        f"output: {{directory: {tmp_path / 'out'}}}\n"
    )
    caplog.set_level(logging.WARNING)
    ran = tinsmith_here(command, str(file))
    number = 4 if command == "eval" else 8
    remedy = "repair it, or raise env: max_failed_share=0.5; the first failure was ConnectionError: the simulator is busy"
    failed = f"environment 'tests.rl.moody:Absent' failed in {number} of {number} episodes"
    assert (ran.returncode, ran.stderr) == (2, f"tinsmith: {failed}; {remedy}\n")
    assert "reward 0.000" not in ran.stdout
    tracebacks = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert len(tracebacks) == 1
    assert tracebacks[0].endswith('    raise ConnectionError("the simulator is busy")\nConnectionError: the simulator is busy')
