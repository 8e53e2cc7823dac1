"""What of a run stays on the server: the newest checkpoints and the best, and nothing that state.json does not name.

Invariant: An RL run deletes only checkpoints that it saved itself.
"""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.rl.test_run import QUIET, chatty, logged
from tinsmith_rl.evaluation import run_evaluation
from tinsmith_rl.resume import RunCheckpoints, RunState, load_state
from tinsmith_rl.trainer import train

KEY = "tml-checkpoints"
Named = Callable[[], set[str]]


@pytest.fixture
def rest(server_url: str) -> tinker.RestClient:
    """A client whose key has no other checkpoints than those of this file."""
    return tinker.RestClient(base_url=server_url, api_key=KEY)


@pytest.fixture
def on_server(rest: tinker.RestClient) -> Named:
    """The paths of all checkpoints that are there, but those that were there before."""

    def paths() -> set[str]:
        return {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints}

    before = paths()
    return lambda: paths() - before


def run(url: str, directory: Path, steps: int, **output: Any) -> RunState:
    """A run, or its rest, that saves every step."""
    server, output = {"url": url, "api_key": KEY}, {"save_every": 1, **output}
    return train(chatty(url, directory, server=server, training={"steps": steps}, output=output), QUIET)


def test_a_run_that_keeps_all_has_the_weights_that_earned_the_best_reward(
    server_url: str, tmp_path: Path, on_server: Named
) -> None:
    state = run(server_url, tmp_path, 4, keep=0)
    rewards = [line["reward"] for line in logged(tmp_path)]
    bests = [step for step, reward in enumerate(rewards) if reward > max(rewards[:step], default=0.0)]
    assert {*state.kept, state.best_weights} <= on_server()
    assert len(on_server()) == len(state.kept) + len(bests) == 8 + len(bests)
    assert (state.best_reward, state.best_step) == (max(rewards), rewards.index(max(rewards)))
    service = tinker.ServiceClient(base_url=server_url, api_key=KEY)
    prompt = tinker.ModelInput.from_ints(list(range(1, 20)))

    def logprobs(path: str) -> list[float | None]:
        return service.create_sampling_client(model_path=path).result().compute_logprobs(prompt).result()[1:]

    if state.best_step:  # the weights before the first step have no other name
        assert logprobs(state.best_weights) == pytest.approx(logprobs(state.kept[2 * state.best_step - 1]), abs=1e-5)


def test_a_run_saves_by_time_too(server_url: str, tmp_path: Path) -> None:
    state = run(server_url, tmp_path, 2, keep=0, save_every=0, save_after_s=1e-6)
    assert [Path(path).name for path in state.kept] == ["step-000001", "step-000001", "step-000002", "step-000002"]


def test_where_every_episode_failed_there_is_no_best_and_no_reward(
    server_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    absent = chatty(
        server_url, tmp_path, env={"name": "tests.rl.moody:Absent", "max_failed_share": 1.0}, training={"steps": 1}
    )
    assert train(absent, QUIET).best_reward is None
    (line,) = logged(tmp_path)
    assert (line["stop/env_error"], "reward" in line) == (1.0, False)
    assert "in 1 batches no episode gave a reward, and nothing was learnt" in caplog.text


def test_a_run_keeps_its_newest_checkpoints_and_its_best(server_url: str, tmp_path: Path, on_server: Named) -> None:
    state = run(server_url, tmp_path, 3, keep=2)
    assert [Path(path).name for path in state.kept] == ["step-000002", "step-000002", "step-000003", "step-000003"]
    assert state.kept[2:] == (state.weights, state.sampler_weights)
    assert on_server() == {*state.kept, state.best_weights}
    resumed = run(server_url, tmp_path, 5, keep=1)
    assert [Path(path).name for path in resumed.kept] == ["step-000005", "step-000005"]
    assert on_server() == {*resumed.kept, resumed.best_weights}
    assert load_state(tmp_path) == resumed


def test_a_rotation_deletes_only_what_its_own_run_saved(server_url: str, tmp_path: Path, on_server: Named) -> None:
    """A copy of a directory names the checkpoints of the first run, begins to rotate, is stopped, and goes on as its
    own."""
    first = run(server_url, tmp_path / "first", 2, keep=2)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    for steps, keep in ((3, 2), (5, 1)):
        copy = run(server_url, tmp_path / "copy", steps, keep=keep)
        assert on_server() == first.paths | copy.paths
    assert Path(copy.weights).name == "step-000005"
    gone_on = run(server_url, tmp_path / "first", 3, keep=1)
    assert on_server() == gone_on.paths | copy.paths | ({first.best_weights} & copy.paths)
    assert not first.paths - {first.best_weights} & on_server()


def test_what_is_best_is_written_at_once_and_the_step_to_resume_stays(
    server_url: str, rest: tinker.RestClient, tmp_path: Path, on_server: Named
) -> None:
    """Step 1 is saved; then steps 2 and 3 are best, one after the other, and the run dies."""

    async def saved() -> RunState:
        client = await tinker.ServiceClient(base_url=server_url, api_key=KEY).create_lora_training_client(
            base_model="tiny", rank=4
        )
        checkpoints = RunCheckpoints(client, rest, tmp_path, 1, RunState())
        state = await checkpoints.save_step(RunState(step=1, tokenizer="there"))
        assert load_state(tmp_path) is None
        await checkpoints.record(state)
        for step, reward in ((2, 0.25), (3, 0.5)):
            state = await checkpoints.save_best(replace(state, step=step, next_group=step), reward)
        return state

    state = asyncio.run(saved())
    written = load_state(tmp_path)
    assert written == replace(state, step=1, next_group=0)
    assert (state.best_step, state.best_reward) == (3, 0.5)
    assert on_server() == state.paths == {state.weights, state.sampler_weights, state.best_weights}


def test_a_checkpoint_that_somebody_else_deleted_is_no_error(
    rest: tinker.RestClient, server_url: str, tmp_path: Path, on_server: Named
) -> None:
    first = run(server_url, tmp_path, 1, keep=1, save_best=False)
    rest.delete_checkpoint_from_tinker_path(first.sampler_weights).result()
    second = run(server_url, tmp_path, 2, keep=1, save_best=False)
    assert on_server() == second.paths == set(second.kept)
    section = {"model": str(tmp_path), "prompts": 2}
    evaluated = chatty(server_url, tmp_path, server={"url": server_url, "api_key": KEY}, evaluation=section)
    assert run_evaluation(evaluated, QUIET).metrics["trajectories"] == 2.0
