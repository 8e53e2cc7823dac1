"""What is measured of a batch, number by number, and that it arrives in every tracker."""

import json
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tinsmith.errors import ConfigError
from tinsmith.rl.config import from_tree
from tinsmith.rl.datums import advantages
from tinsmith.rl.env import Prompt
from tinsmith.rl.groups import Group
from tinsmith.rl.metrics import BatchWatch, make_trackers, pass_at_k, succeeded, trajectory_metrics
from tinsmith.rl.sequences import text_sequence
from tinsmith.rl.trajectory import EpisodeId, StopReason, Trajectory, Turn, assemble


def trajectory(reward: float, tokens: int, reason: StopReason = "done") -> Trajectory:
    """One turn of so many tokens, each sampled with a probability of one half."""
    logprobs = np.full(tokens, np.log(0.5), np.float32)
    turn = Turn(text_sequence([1, 2]), np.arange(tokens, dtype=np.int32), logprobs, reward)
    return Trajectory(EpisodeId("test", 0), assemble([turn]), reason, 1, {"found": reward}, seconds={"env": 0.5 * tokens})


def test_a_batch_in_numbers() -> None:
    lost = Trajectory(EpisodeId("test", 0), (), "env_timeout", 0)
    made = trajectory_metrics([[trajectory(1.0, 2), trajectory(0.0, 4, "length")], [trajectory(0.5, 3), trajectory(0.5, 3), lost]])
    assert made == pytest.approx(
        {
            "reward": 0.5,
            "reward_std": np.std([1.0, 0.0, 0.5, 0.5]),
            "trajectories": 5.0,
            "dropped": 1.0,
            "turns": 1.0,
            "response_tokens": 3.0,
            "samples_per_trajectory": 1.0,
            "truncated": 0.2,
            "entropy": np.log(2),
            "zero_variance_groups": 0.5,
            "tokens/sampled": 12.0,
            "tokens/sequence": 20.0,
            "stop/done": 0.6,
            "stop/length": 0.2,
            "stop/env_timeout": 0.2,
            **{f"stop/{reason}": 0.0 for reason in ("context", "max_turns", "empty", "env_error")},
            "env/found": 0.5,
            "seconds/env_of_a_trajectory": 6.0 / 5,
        }
    )


def earned(*rewards: float) -> float:
    """The whole reward of an episode with these rewards, turn by turn."""
    turns, seen = [], [1, 2]
    for reward in rewards:
        turns.append(Turn(text_sequence(seen), np.array([7], np.int32), np.zeros(1, np.float32), reward))
        seen = [*seen, 7, 8]
    return Trajectory(EpisodeId("test", 0), assemble(turns), "done", len(turns)).reward


def test_a_reward_is_what_the_environment_gave() -> None:
    assert earned(0.9) == 0.9
    assert earned(0.1, 0.9) == 1.0
    assert earned(50.3, 50.4, 0.1) == earned(0.1, 50.4, 50.3)
    (values,) = advantages("grpo", [[earned(100.7), earned(50.3, 50.4), earned(50.4, 50.3)]])
    assert np.abs(values).max() < 1e-6


def test_successes_forgive_a_rounding() -> None:
    assert all(succeeded(earned(*[1 / turns] * turns), 1.0) for turns in range(1, 40))
    assert succeeded(2.0, 1.0)
    assert not succeeded(0.999999, 1.0)
    assert succeeded(0.0, 0.0)


def test_a_batch_of_nothing_has_numbers_too() -> None:
    made = trajectory_metrics([[Trajectory(EpisodeId("test", 0), (), "empty", 1)]])
    assert (made["entropy"], made["dropped"], made["stop/empty"]) == (0.0, 1.0, 1.0)
    assert not {"reward", "reward_std"} & set(made)  # 0.0 would look like one


def test_pass_at_k_is_the_chance_of_one_success_in_k() -> None:
    attempts = [True, False, False, False]
    assert pass_at_k([attempts], 1) == pytest.approx(1 / 4)
    assert pass_at_k([attempts], 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k([attempts], 4) == 1.0
    assert pass_at_k([attempts, [False] * 4], 2) == pytest.approx(1 / 4)


SETTINGS = {"training": {"steps": 2}}
LINES = [(0, {"eval/reward": 0.125}), (1, {"reward": 0.375}), (2, {"reward": 0.625, "eval/reward": 0.875})]


def log_a_run(service: str, directory: Path) -> None:
    directory.mkdir()
    trackers = make_trackers([service], directory, SETTINGS, Console(quiet=True))
    for tracker in trackers:
        for step, metrics in LINES:
            tracker.log(step, metrics)
        tracker.close()


def eventually(happened: Callable[[], bool]) -> bool:
    """Whether it happens in time: what is finished may still be on its way to the disk."""
    deadline = time.monotonic() + 600
    while not (done := happened()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return done


def test_wandb_records_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    pytest.importorskip("wandb")
    log_a_run("wandb", tmp_path / "first")
    (record,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert eventually(lambda: all(number in record.read_bytes() for number in (b"0.125", b"0.375", b"0.625", b"0.875")))


def test_trackio_records_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    log_a_run("trackio", tmp_path / "first")
    expected = ['{"eval/reward":0.125}', '{"reward":0.375}', '{"reward":0.625,"eval/reward":0.875}']
    rows = [("first", step, metrics) for step, metrics in enumerate(expected)]
    with sqlite3.connect(tmp_path / "tinsmith-rl.db") as database:
        query = "select run_name, step, cast(metrics as text) from metrics order by step"
        assert eventually(lambda: database.execute(query).fetchall() == rows)


def test_trackers_log_to_their_places(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    for tracker in make_trackers(["console", "tensorboard"], tmp_path, {}, console):
        for step in range(3):
            tracker.log(step, {"reward": step / 4, "seconds/left": 3725.4})
        tracker.close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][2] == {
        "step": 2,
        "reward": 0.5,
        "seconds/left": 3725.4,
    }
    assert "step    2  reward 0.500  left 1:02:05" in console.export_text()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"reward") >= 3
    before = (tmp_path / "metrics.jsonl").read_text()
    (tracker,) = make_trackers([], tmp_path, {}, console)
    assert (tmp_path / "metrics.jsonl").read_text() == before  # until there is something in the place of the steps that are done again
    for step, reward in ((1, 4.0), (2, 9.0), (1, 5.0), (2, 6.0)):  # and once more
        tracker.log(step, {"reward": reward})
    again = '{"step": 0, "reward": 0.0, "seconds/left": 3725.4}\n{"step": 1, "reward": 5.0}\n{"step": 2, "reward": 6.0}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == again


def test_a_line_that_a_killed_run_did_not_finish_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n{"step": 1, "rew')
    (tracker,) = make_trackers([], tmp_path, {}, Console())
    tracker.log(2, {"reward": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "reward": 0.5}\n{"step": 2, "reward": 1.0}\n'


def test_trackers_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="trackers: 'paper' is not known; known are console, tensorboard, wandb and trackio"):
        make_trackers(["paper"], tmp_path, {}, Console())
    with pytest.raises(ConfigError, match="trackers: 'wandb' is not installed; install it with: pip install wandb"):
        make_trackers(["wandb"], tmp_path, {}, Console())


def batch(*groups: list[float], reason: StopReason = "done") -> list[Group]:
    return [Group(0, Prompt(0), 0, tuple(trajectory(reward, 2, reason) for reward in rewards)) for rewards in groups]


@pytest.mark.parametrize(
    ("sections", "groups", "warning"),
    [
        (
            {},
            batch([0.0, 0.0], [0.0, 0.0]),
            "in 5 batches every reward was 0, and nothing was learnt. Let the model begin with some reward: warm it up",
        ),
        ({}, batch([0.0, 0.0], [1.0, 1.0]), "in each group all rewards were equal, and nothing was learnt. Let the model"),
        ({}, [Group(0, Prompt(0), 0, (Trajectory(EpisodeId("test", 0), (), "empty", 0),))], "no episode gave a reward, and nothing"),
        (
            {"generation": {"temperature": 0}},
            batch([0.0, 0.0]),
            "generation: temperature=0 gives all episodes of a group the same",
        ),
        ({}, batch([0.0, 1.0], reason="length"), "every episode was cut; raise generation: max_tokens=256"),
        (
            {"training": {"overlong_filtering": True}},
            batch([0.0, 1.0], reason="length"),
            "every episode was cut, and nothing was learnt; raise generation: max_tokens=256",
        ),
        ({}, batch([0.0, 1.0], reason="context"), "every episode was cut; raise generation: max_context=0"),
        ({"training": {"advantages": "batch"}}, batch([0.0, 0.0], [1.0, 1.0]), ""),
        ({}, batch([0.0, 1.0]), ""),
    ],
)
def test_a_run_that_learns_nothing_says_so_once(
    sections: dict[str, Any], groups: list[Group], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    watch = BatchWatch(from_tree({"model": {"base_model": "tiny"}, "env": {"name": "maze2d"}, **sections}))
    for _ in range(20):
        watch.look(groups)
    assert [warning in message for message in caplog.messages] == [True] * bool(warning)
