"""What is measured of a batch, number by number, and that it arrives in every tracker."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tinsmith_rl.config import from_tree
from tinsmith_rl.datums import advantages
from tinsmith_rl.env import Prompt
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.groups import Group
from tinsmith_rl.metrics import BatchWatch, make_trackers, pass_at_k, succeeded, trajectory_metrics
from tinsmith_rl.sequences import text_sequence
from tinsmith_rl.trajectory import EpisodeId, StopReason, Trajectory, Turn, assemble


def trajectory(reward: float, tokens: int, reason: StopReason = "done") -> Trajectory:
    """One turn of so many tokens, each sampled with a probability of one half."""
    logprobs = np.full(tokens, np.log(0.5), np.float32)
    turn = Turn(text_sequence([1, 2]), np.arange(tokens, dtype=np.int32), logprobs, reward)
    return Trajectory(
        EpisodeId("test", 0), assemble([turn]), reason, 1, {"found": reward}, seconds={"env": 0.5 * tokens}
    )


def test_a_batch_in_numbers() -> None:
    lost = Trajectory(EpisodeId("test", 0), (), "env_timeout", 0)
    made = trajectory_metrics(
        [[trajectory(1.0, 2), trajectory(0.0, 4, "length")], [trajectory(0.5, 3), trajectory(0.5, 3), lost]]
    )
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
    nothing = trajectory_metrics([[Trajectory(EpisodeId("test", 0), (), "empty", 1)]])
    assert (nothing["entropy"], nothing["dropped"], nothing["stop/empty"]) == (0.0, 1.0, 1.0)
    assert not {"reward", "reward_std"} & set(nothing)  # 0.0 would look like one


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
    assert all(succeeded(earned(*[1 / turns] * turns), 1.0) for turns in range(1, 40))
    assert not succeeded(0.999999, 1.0)
    (values,) = advantages("grpo", [[earned(100.7), earned(50.3, 50.4), earned(50.4, 50.3)]])
    assert np.abs(values).max() < 1e-6


def test_pass_at_k_is_the_chance_of_one_success_in_k() -> None:
    attempts = [True, False, False, False]
    assert pass_at_k([attempts], 1) == pytest.approx(1 / 4)
    assert pass_at_k([attempts], 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k([attempts], 4) == 1.0
    assert pass_at_k([attempts, [False] * 4], 2) == pytest.approx(1 / 4)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_records_every_step(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    service = SimpleNamespace(
        init=lambda **named: called.append(named["name"]), finish=lambda: called.append("finished")
    )
    service.log = lambda metrics, step: called.append((step, metrics))
    monkeypatch.setitem(sys.modules, name, service)
    _, tracker = make_trackers([name], tmp_path, {}, Console(quiet=True))
    tracker.log(1, {"reward": 0.375})
    tracker.log(2, {"reward": 0.625})
    tracker.close()
    assert called == [tmp_path.name, (1, {"reward": 0.375}), (2, {"reward": 0.625}), "finished"]


def test_trackers_log_to_their_places(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    for tracker in make_trackers(["console", "tensorboard"], tmp_path, {}, console):
        for step in range(3):
            tracker.log(step, {"reward": step / 4, "seconds/left": 3725.4})
        tracker.close()
    file = tmp_path / "metrics.jsonl"
    assert json.loads(file.read_text().splitlines()[2]) == {"step": 2, "reward": 0.5, "seconds/left": 3725.4}
    assert "step    2  reward 0.500  left 1:02:05" in console.export_text()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"reward") >= 3


def test_a_step_that_is_done_again_replaces_its_line_and_those_behind_it(tmp_path: Path) -> None:
    """Until there is something in their place they stay; a line that a killed run did not finish is dropped."""
    file = tmp_path / "metrics.jsonl"
    before = '{"step": 0, "reward": 0.5}\n{"step": 1, "reward": 0.5}\n{"step": 2, "rew'
    file.write_text(before)
    (tracker,) = make_trackers([], tmp_path, {}, Console())
    assert file.read_text() == before
    for step, reward in ((1, 4.0), (2, 9.0), (1, 5.0), (2, 6.0)):
        tracker.log(step, {"reward": reward})
    assert file.read_text() == '{"step": 0, "reward": 0.5}\n{"step": 1, "reward": 5.0}\n{"step": 2, "reward": 6.0}\n'


def test_trackers_that_are_not_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match="trackers: 'paper' is not known; known are console, tensorboard, wandb and trackio"
    ):
        make_trackers(["paper"], tmp_path, {}, Console())
    with pytest.raises(
        ConfigError, match=r"trackers: 'wandb' is not installed: .*; install it with: pip install wandb"
    ):
        make_trackers(["wandb"], tmp_path, {}, Console())


def batch(*groups: list[float], reason: StopReason = "done") -> list[Group]:
    return [Group(0, Prompt(0), 0, tuple(trajectory(reward, 2, reason) for reward in rewards)) for rewards in groups]


@pytest.mark.parametrize(
    ("sections", "groups", "warning"),
    [
        (
            {},
            batch([0.0] * 2, [0.0] * 2),
            "in 5 batches every reward was 0, and nothing was learnt. Let the model begin with some reward",
        ),
        ({"generation": {"temperature": 0}}, batch([0.0, 0.0]), "temperature=0 gives all episodes of a group the same"),
        ({}, batch([0.0, 1.0], reason="length"), "every episode was cut; raise generation: max_tokens=256"),
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
