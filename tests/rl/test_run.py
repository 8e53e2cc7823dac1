"""Short runs against a real server process: what is logged and written, resuming, evaluation, corrections, schedules.

Invariant: A resumed RL run is the undisturbed one; schedules keep their bound on staleness.
Also: `tests/rl/test_groups.py`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.preloaded import REAL_PYTHON
from tinsmith.cli import app
from tinsmith_rl.config import RlConfig, from_tree, to_tree
from tinsmith_rl.episode_files import read_heading, read_lines
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.evaluation import run_evaluation
from tinsmith_rl.resume import RunState, load_state
from tinsmith_rl.trainer import train

QUIET = Console(quiet=True)
ALONE = """
import sys
sys.modules |= dict.fromkeys(["tinsmith", "torch", "torchvision"])
from tinsmith_rl.__main__ import main
main(sys.argv[1:])
"""
ALWAYS_LOGGED = [
    *("reward", "response_tokens", "turns", "truncated", "entropy", "kl_sampler_trainer", "zero_variance_groups"),
    *(
        "tokens/sampled",
        "tokens/sequence",
        "seconds/wait",
        "seconds/learn",
        "seconds/publish",
        "seconds/step",
        "seconds/left",
    ),
    *(
        "staleness",
        "stop/done",
        "stop/length",
        "stop/context",
        "stop/max_turns",
        "stop/empty",
        "stop/env_error",
        "stop/env_timeout",
    ),
]
EVALUATED = {"evaluation": {"every": 4, "prompts": 4}}


def config_of(url: str, directory: Path, **sections: dict[str, Any]) -> RlConfig:
    """Four steps of ColorSquare with the smallest batches."""
    tree: dict[str, dict[str, Any]] = {
        "server": {"url": url, "api_key": "tml-test"},
        "model": {"base_model": "tiny-vl", "rank": 8},
        "env": {"name": "color_square"},
        "generation": {"max_tokens": 6},
        "training": {"steps": 4, "groups": 2, "group_size": 3, "learning_rate": 1e-3},
        "warmup": {"steps": 14, "episodes": 8, "learning_rate": 3e-3},
        "output": {"directory": str(directory), "trackers": [], "trajectories_every": 2},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return from_tree(tree)


def test_a_run_with_images_needs_neither_the_server_s_package_nor_torch(server_url: str, tmp_path: Path) -> None:
    tree = to_tree(config_of(server_url, tmp_path / "run", training={"steps": 1}, warmup={"steps": 0}))
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                **tree,
                "server": {"url": server_url, "api_key": "tml-test"},
                "evaluation": {"model": str(tmp_path / "run")},
            }
        )
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "rl")}
    for options in ([], ["--eval"]):
        command = [REAL_PYTHON, "-c", ALONE, *options, str(tmp_path / "run.yaml")]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, "PyTorch" in done.stderr) == (0, False), done.stderr
    assert [line["step"] for line in logged(tmp_path / "run")] == [1]
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["trajectories"] == 64


def chatty(url: str, directory: Path, **sections: dict[str, Any]) -> RlConfig:
    """The smallest batches of an environment that needs no warm-up, on a text model."""
    smallest: dict[str, dict[str, Any]] = {
        "model": {"base_model": "tiny", "rank": 4},
        "env": {"name": "tests.rl.moody:Chatty"},
        "training": {"groups": 1, "group_size": 2},
        "warmup": {"steps": 0},
        "output": {"trajectories_every": 0},
    }
    for name, section in sections.items():
        smallest[name] = {**smallest.get(name, {}), **section}
    return config_of(url, directory, **smallest)


def logged(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def told(directory: Path, step: int) -> list[dict[str, Any]]:
    """The trajectories of a step."""
    return read_lines(directory / "trajectories" / f"step-{step:06d}.jsonl.zst")


@pytest.fixture(scope="module")
def undisturbed(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunState]:
    """A run of four steps, which shows all that it does."""
    directory = tmp_path_factory.mktemp("undisturbed")
    config = config_of(server_url, directory, **EVALUATED, output={"trackers": ["tensorboard", "console"]})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tinsmith_rl.trainer.SHOWN_EVERY_S", 0.0)
        return directory, train(config, Console(file=(directory / "console").open("w"), width=80))


def test_a_run_logs_and_writes_what_it_did(undisturbed: tuple[Path, RunState]) -> None:
    directory, state = undisturbed
    lines = logged(directory)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    for line in lines[1:]:
        assert set(ALWAYS_LOGGED) <= set(line)
        assert line["kl_sampler_trainer"] < 1e-6  # one code path samples and trains
    assert {"eval/reward", "eval/env/first_right"} <= set(lines[0]) & set(lines[-1])
    assert state == load_state(directory)
    assert (state.step, state.next_group, state.weights.partition(":")[0]) == (4, 8, "tinker")
    heading = read_heading(directory / "trajectories" / "step-000004.jsonl.zst")
    assert (heading["kind"], heading["step"], heading["groups"], heading["reward"]) == (
        *("step", 4, 2),
        pytest.approx(lines[-1]["reward"]),
    )
    assert {each.name for each in (directory / "trajectories" / "images").iterdir()} >= set(heading["images"])
    assert list((directory / "tensorboard").iterdir())
    first_line, *shown = (directory / "console").read_text().splitlines()
    assert first_line.startswith(
        "color_square: steps 1 to 4, with 2 x 3 episodes in each; 1000 prompts, 4 others evaluated; metrics in "
    )
    assert state.weights.rpartition("/weights/")[0] in first_line
    assert {f"step {step} of 4: {played} of 2 groups played" for step in (1, 2, 3, 4) for played in (1, 2)} <= set(
        shown
    )
    assert [line["seconds/left"] > 0 for line in lines[1:]] == [True, True, True, False]
    assert "tml-test" not in (directory / "config.json").read_text()
    for trajectory in told(directory, 4):
        (sample,) = trajectory["samples"]
        counts = {len(sample[name]) for name in ("logprobs", "trainer_logprobs", "advantages")}
        assert counts == {sum(stop - start for start, stop in sample["sampled"])}
        assert sample["trainer_logprobs"] == pytest.approx(sample["logprobs"], abs=1e-3)
        assert sum(reward for _, reward in sample["rewards"]) == trajectory["reward"]
        assert len(sample["images"]) == trajectory["turns"]


def test_a_stopped_and_resumed_run_is_the_undisturbed_one(
    undisturbed: tuple[Path, RunState], server_url: str, tmp_path: Path
) -> None:
    train(config_of(server_url, tmp_path, **EVALUATED, training={"steps": 2}), QUIET)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward": 9.0}\n')  # a step that was done, but not saved, when the run was killed
    state = train(config_of(server_url, tmp_path, **EVALUATED), QUIET)
    for again, once in zip(told(tmp_path, 4), told(undisturbed[0], 4), strict=True):
        for sample, expected in zip(again.pop("samples"), once.pop("samples"), strict=True):
            # The same batch packed in another order of arrival differs in the last bits.
            for name in ("logprobs", "trainer_logprobs"):
                assert sample.pop(name) == pytest.approx(expected.pop(name), abs=1e-4)
            assert sample.pop("advantages") == pytest.approx(expected.pop("advantages"))
            assert sample == expected
        assert again | {"seconds": {}} == once | {"seconds": {}}
    assert (state.step, state.next_group) == (4, 8)
    lines, expected_lines = (
        [line for line in logged(directory) if line["step"] > 0] for directory in (tmp_path, undisturbed[0])
    )
    assert [(line["step"], line["reward"]) for line in lines] == [
        (line["step"], line["reward"]) for line in expected_lines
    ]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected_lines], abs=1e-4)


def test_evaluation_samples_a_run_a_checkpoint_or_the_base_model(
    undisturbed: tuple[Path, RunState], server_url: str, tmp_path: Path
) -> None:
    directory, state = undisturbed
    rewards = {}
    for model in (state.sampler_weights, state.weights, ""):
        section = {"model": model, "prompts": 4, "samples": 4, "pass_at": [1, 4], "temperature": 0.5}
        config = config_of(server_url, tmp_path, evaluation=section, model={"tokenizer": state.tokenizer})
        rewards[model] = [trajectory.reward for trajectory in run_evaluation(config, QUIET).trajectories]
        report = json.loads((tmp_path / "evaluation.json").read_text())
        assert (report["model"], report["pass@1"] <= report["pass@4"]) == (model or "tiny-vl", True)
        heading = read_heading(tmp_path / "trajectories" / "evaluation.jsonl.zst")
        assert (heading["kind"], heading["model"], heading["trajectories"]) == ("evaluation", report["model"], 16)
    assert rewards[state.sampler_weights] == rewards[state.weights]
    assert max(rewards[state.weights]) > max(rewards[""]) == 0.0
    with pytest.raises(ConfigError, match="no directory of a run"):
        run_evaluation(config_of(server_url, tmp_path, evaluation={"model": str(tmp_path)}), QUIET)
    (tmp_path / "run.yaml").write_text(
        f"server: {{url: '{server_url}', api_key: tml-test}}\n"
        f"model: {{base_model: tiny-vl}}\nenv: {{name: color_square}}\ngeneration: {{max_tokens: 6}}\n"
        f"evaluation: {{model: {directory}, prompts: 2}}\noutput: {{directory: {tmp_path}}}\n"
    )
    evaluated = CliRunner().invoke(app, ["eval", str(tmp_path / "run.yaml")])
    assert (evaluated.exit_code, "zero_variance_groups" in evaluated.output) == (0, True), evaluated.output
    assert json.loads((tmp_path / "evaluation.json").read_text())["model"] == state.best_weights


@pytest.mark.parametrize(("mode", "bound"), [("one_step_off", 1), ("async", 2)])
def test_other_schedules_run_ahead_within_their_bound(mode: str, bound: int, server_url: str, tmp_path: Path) -> None:
    training = {"mode": mode, "max_staleness": 2, "steps": 5, "groups": 2}
    assert train(chatty(server_url, tmp_path, training=training), QUIET).step == 5
    assert 1 <= max(line["staleness_max"] for line in logged(tmp_path)) <= bound


def test_stable_reinforce_trains_on_what_was_recorded(
    undisturbed: tuple[Path, RunState], server_url: str, tmp_path: Path
) -> None:
    """Of two turns with images, with an unsampled end of turn behind each, and with one sample for each turn."""
    model, training = {"start_from": undisturbed[1].weights}, {"loss": "stable_reinforce", "steps": 2, "groups": 4}
    generations: dict[str, dict[str, Any]] = {"merged": {"stop": ["e"]}, "single": {"context_turns": 1}}
    for name, generation in generations.items():
        config = config_of(
            server_url, tmp_path / name, model=model, training=training, generation=generation, warmup={"steps": 0}
        )
        train(config, QUIET)
        assert any(line["optimizer_steps"] for line in logged(tmp_path / name))
        assert all(line["turns"] > 1 and line["kl_sampler_trainer"] < 1e-6 for line in logged(tmp_path / name))


def test_corrections_penalty_and_filters_are_applied(
    undisturbed: tuple[Path, RunState], server_url: str, tmp_path: Path
) -> None:
    corrections = {
        "kl_coefficient": 0.1,
        "tis_cap": 2.0,
        "overlong_filtering": True,
        "dynamic_sampling": True,
        "loss_scale": "sequences",
    }
    ppo = {
        "loss": "ppo",
        "loss_options": {"clip_high_threshold": 1.3},
        "advantages": "reinforce_pp",
        "substeps": 2,
        "epochs": 2,
    }
    model, training = {"start_from": undisturbed[1].weights}, {**corrections, **ppo, "steps": 3}
    train(config_of(server_url, tmp_path, model=model, training=training, warmup={"steps": 0}), QUIET)
    for line in logged(tmp_path):
        assert line["tis_weight"] == pytest.approx(1.0, abs=1e-3)
        assert line["tis_capped"] == 0.0
        assert line["kl_reference"] > 0.1  # it starts far from the base model
        assert line["optimizer_steps"] == 4.0
    assert any(line["groups_without_variance_replaced"] > 0 for line in logged(tmp_path))
