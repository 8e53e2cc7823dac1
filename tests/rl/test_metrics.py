"""What is logged of a batch, number by number."""

import numpy as np
import pytest

from tinsmith.rl.advantages import advantages
from tinsmith.rl.assemble import assemble
from tinsmith.rl.metrics import pass_at_k, succeeded, trajectory_metrics
from tinsmith.rl.stream import text_stream
from tinsmith.rl.trajectory import Origin, StopReason, Trajectory, Turn


def trajectory(reward: float, tokens: int, reason: StopReason = "done") -> Trajectory:
    """One turn of so many tokens, each sampled with a probability of one half."""
    logprobs = np.full(tokens, np.log(0.5), np.float32)
    turn = Turn(text_stream([1, 2]), np.arange(tokens, dtype=np.int32), logprobs, reward)
    return Trajectory(Origin("test", 0), assemble([turn]), reason, 1, {"found": reward}, seconds={"env": 0.5 * tokens})


def test_a_batch_in_numbers() -> None:
    lost = Trajectory(Origin("test", 0), (), "env_timeout", 0)
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
        turns.append(Turn(text_stream(seen), np.array([7], np.int32), np.zeros(1, np.float32), reward))
        seen = [*seen, 7, 8]
    return Trajectory(Origin("test", 0), assemble(turns), "done", len(turns)).reward


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
    made = trajectory_metrics([[Trajectory(Origin("test", 0), (), "empty", 1)]])
    assert (made["entropy"], made["dropped"], made["stop/empty"]) == (0.0, 1.0, 1.0)
    assert not {"reward", "reward_std"} & set(made)  # 0.0 would look like one


def test_pass_at_k_is_the_chance_of_one_success_in_k() -> None:
    attempts = [True, False, False, False]
    assert pass_at_k([attempts], 1) == pytest.approx(1 / 4)
    assert pass_at_k([attempts], 2) == pytest.approx(1 - 3 / 6)
    assert pass_at_k([attempts], 4) == 1.0
    assert pass_at_k([attempts, [False] * 4], 2) == pytest.approx(1 / 4)
