"""An environment that fails now and then is reported; one that fails too often ends the run, and nobody takes its 0.000 for a reward."""

import logging
from pathlib import Path

import pytest

from tests.running import tinsmith_here
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.failures import Failures, TooManyFailuresError
from tinsmith.rl.trajectory import Origin, StopReason, Trajectory


def episodes(done: int = 0, env_error: int = 0, env_timeout: int = 0) -> list[Trajectory]:
    """A group in which so many episodes ended so."""
    error, details = "KeyError: 'lost'", "Traceback\nKeyError: 'lost'"
    counts: dict[StopReason, int] = {"done": done, "env_error": env_error, "env_timeout": env_timeout}
    reasons = [reason for reason, count in counts.items() for _ in range(count)]
    return [Trajectory(Origin("maze", 0), (), reason, 0, error=error, details=details) for reason in reasons]


def test_the_first_traceback_is_printed_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures("maze", max_share=0.5, max_groups=8)
    failures.count(episodes(done=1, env_error=1, env_timeout=1))
    failures.count(episodes(done=2, env_error=1))
    failures.judge()
    failures.count(episodes(done=2))
    failures.judge()
    assert [record.getMessage() for record in caplog.records] == [
        "environment 'maze' failed in an episode (env_error):\nTraceback\nKeyError: 'lost'",
        "environment 'maze' failed in 3 more episodes, 3 in all",
    ]


def test_too_large_a_share_ends_the_run_once_there_are_enough_episodes() -> None:
    failures = Failures("maze", max_share=0.5, max_groups=8)
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
    failures = Failures("maze", max_share=1.0, max_groups=2)
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
