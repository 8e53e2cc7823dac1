"""The configuration of a run refuses what it does not know and what cannot work."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import tinker
from rich.console import Console
from tinker.lib.public_interfaces.sampling_client import _load_tokenizer_from_model_info
from typer.testing import CliRunner

from tinsmith.cli import app
from tinsmith_rl.__main__ import main
from tinsmith_rl.config import begin_another, from_tree, load, to_tree
from tinsmith_rl.env import Prompt, find, make
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.evaluation import run_evaluation
from tinsmith_rl.policy import tokenizer_of
from tinsmith_rl.workers import make_workers

EXAMPLES = Path(__file__).parents[2] / "examples" / "rl"
SMALLEST: dict[str, Any] = {"model": {"base_model": "tiny"}, "env": {"name": "maze2d"}}


def test_a_file_fills_the_tree_and_the_rest_is_default(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {base_model: tiny}\nenv: {name: maze2d, options: {level: hard}}\ntraining: {mode: "
        "async, max_staleness: 3}\n"
    )
    config = load(file)
    assert (config.env.options, config.staleness, config.training.loss) == ({"level": "hard"}, 3, "importance_sampling")
    assert "api_key" not in to_tree(from_tree({**to_tree(config), "server": {"api_key": "tml-secret"}}))["server"]
    assert [from_tree({**SMALLEST, "training": {"mode": mode}}).staleness for mode in ("sync", "one_step_off")] == [
        0,
        1,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "training: {steps: 3}\ntraining: {steps: 4}\n",
            "line 2 has the key 'training' of line 1 again; merge what stands below the two; it",
        ),
        (
            "training: [",
            "cannot read the configuration file .*run.yaml: while parsing a flow node .*; it must be YAML in UTF-8$",
        ),
        ("- training\n", "must hold sections such as 'server:', not a list"),
        ("", "env: name is missing"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / "run.yaml")


def test_a_number_may_be_a_text_and_a_path_at_home() -> None:
    """YAML takes 1e-4 for a text."""
    config = from_tree(
        {**SMALLEST, "training": {"learning_rate": "1e-4", "steps": "3"}, "output": {"directory": "~/run"}}
    )
    assert (config.training.learning_rate, config.training.steps) == (1e-4, 3)
    assert config.output.directory == str(Path.home() / "run")


def test_output_is_named_after_the_file_and_new_begins_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maze.yaml").write_text("model: {base_model: tiny}\nenv: {name: maze2d}\n")
    for directory in ("rl-output/maze", "rl-output/maze-2", "rl-output/maze-3"):
        config = load(tmp_path / "maze.yaml")
        assert config.output.directory == "rl-output/maze"
        begin_another(config)
        assert config.output.directory == directory
        Path(directory).mkdir(parents=True)


MY_ENV = """
from tinsmith_rl.env import Env, Step, register, user

class {name}(Env):
    def init(self, prompt): return [user("hi")], {{}}
    def step(self, text): return Step([], 1.0, True)

register("registered-{name}", {name})
"""


def test_a_run_of_the_command_line_resumes_or_with_new_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tinsmith_rl.__main__.require_server", lambda _: None)
    monkeypatch.setattr("tinsmith_rl.trainer.train", lambda config: trained.append(config.output.directory))
    (tmp_path / "-maze.yaml").write_text(
        "model: {base_model: tiny}\nenv: {name: maze2d}\noutput: {directory: rl-output/maze}\n"
    )
    (tmp_path / "rl-output" / "maze").mkdir(parents=True)
    for options in ([], ["--new"]):
        assert CliRunner().invoke(app, ["rl", *options, "--", "-maze.yaml"]).exit_code == 0
        main([*options, "--", "-maze.yaml"])
    assert trained == ["rl-output/maze"] * 2 + ["rl-output/maze-2"] * 2


def test_ctrl_c_ends_either_command_line_without_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tinsmith_rl.__main__.require_server", waits)
    file = tmp_path / "maze.yaml"
    file.write_text("model: {base_model: tiny}\nenv: {name: maze2d}\n")
    ended = CliRunner().invoke(app, ["rl", str(file)])
    with pytest.raises(SystemExit) as raised:
        main([str(file)])
    assert (ended.exit_code, raised.value.code) == (130, 130)


def test_an_environment_may_lie_in_the_working_directory_or_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("tinsmith_rl.env._factories", {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "else where").mkdir()
    for file, name in (("here_env.py", "Here"), ("else where/there_env.py", "There"), ("json.py", "Mine")):
        (tmp_path / file).write_text(MY_ENV.format(name=name))
    (tmp_path / "broken_env.py").write_text("\nraise ZeroDivisionError('half done')\n")
    for env in (
        {"name": "here_env:Here"},
        {"import": "here_env.py", "name": "Here"},
        {"import": "else where/there_env.py", "name": "There"},
        {"import": f"{tmp_path}/else where/there_env.py", "name": "registered-There"},
    ):
        assert make(from_tree({**SMALLEST, "env": env}).env.name).init(Prompt(0))[0]
    processes = make_workers("process", 1, 600.0)
    asyncio.run(processes.open("else where/there_env.py:There", {}))  # which imports it again
    processes.shutdown()
    for name, message in (
        ("broken_env:Env", r"cannot import 'broken_env': ZeroDivisionError: half done \(.*broken_env.py, line 2\)"),
        ("here_env.py:Nobody", "here_env.py has no 'Nobody'"),
        ("nowhere_env.py:Env", "there is no file .*nowhere_env.py"),
        ("nowhere_env:Env", "ModuleNotFoundError: No module named 'nowhere_env'$"),
        ("json.py:Mine", "json.py has the name of another module, .*; rename it"),
    ):
        with pytest.raises(ConfigError, match=message):
            find(name)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.yaml")), ids=lambda file: file.stem)
def test_an_example_names_settings_and_an_environment_that_there_are(file: Path) -> None:
    env = load(file).env
    assert make(env.name, **env.options).init(Prompt(0))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainign": {}}, "unknown key 'trainign'; did you mean 'training'?"),
        (
            {"training": {"lerning_rate": 1}},
            "unknown key 'training.lerning_rate'; did you mean 'training.learning_rate'?",
        ),
        (
            {"training": {"loss": "cross_entropy"}},
            "training.loss='cross_entropy' must be one of importance_sampling, ppo, ",
        ),
        ({"training": {"steps": 0}}, "training.steps=0 must be a whole number of steps of at least 1"),
        ({"training": {"group_size": 1}}, "group_size=1 leaves grpo nothing to compare with"),
        ({"training": {"groups": 2, "substeps": 3}}, "substeps=3 exceeds groups=2"),
        ({"training": {"loss": "dro"}}, "loss_scale=tokens would divide dro's advantages, but not its penalty"),
        (
            {"training": {"kl_coefficient": 0.1}, "generation": {"temperature": 0.7}},
            "temperature=0.7: the KL penalty compares",
        ),
        (
            {"training": {"loss": "ppo"}, "generation": {"temperature": 0.7}},
            "temperature=0.7: ppo would clip the ratio",
        ),
        (
            {"training": {"loss": "stable_reinforce"}, "generation": {"temperature": 0.7}},
            "these must be at temperature 1",
        ),
        (
            {"training": {"loss": "stable_reinforce"}, "env": {"name": "a:b", "kind": "cookbook"}},
            "which kind=cookbook does not say",
        ),
        ({"evaluation": {"samples": 2, "pass_at": [1, 4]}}, r"pass_at=\[4\] must lie between 1 and samples=2"),
        ({"evaluation": {"pass_at": "1"}}, "evaluation.pass_at='1' must be a list of whole numbers"),
        ({"env": {}}, "env: name is missing"),
        ({"env": "maze2d"}, "env='maze2d' must be a section"),
        ({"training": {"max_tokens": 8}}, "unknown key 'training.max_tokens'; did you mean 'generation.max_tokens'?"),
        ({"evaluation": {"seeed": 8}}, "unknown key 'evaluation.seeed'; did you mean 'evaluation.seed'?"),
        ({"model": {"xyz": 8}}, "unknown key 'model.xyz'; known here: base_model, start_from, rank"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate='fast' must be a number of at least 0$"),
        ({"generation": {"top_p": float("nan")}}, "generation.top_p=nan must be a number from 0 to 1$"),
        ({"training": {"overlong_filtering": 1}}, "training.overlong_filtering=1 must be true or false"),
        ({"env": {"import": "here_env", "name": "Here"}}, "env: import='here_env', name='Here' must be a Python file"),
    ],
)
def test_what_cannot_work_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tree({**SMALLEST, **change})


def test_a_base_model_whose_name_leads_to_no_tokenizer_needs_one(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hub is not asked: it would be asked again and again."""
    monkeypatch.setattr(
        "transformers.AutoTokenizer.from_pretrained", lambda source, **_: pytest.fail(f"asked for {source}")
    )
    config = from_tree({**SMALLEST, "server": {"url": server_url, "api_key": "tml-test"}})
    named = "the one that the server names cannot be loaded: 'tiny' is no directory on this machine"
    with pytest.raises(ConfigError, match=f"model: tokenizer is empty, and {named}"):
        run_evaluation(config, Console(quiet=True))


@pytest.mark.parametrize(
    ("base_model", "source"), [("org/model", ""), ("org/model/variant:high", ""), ("tiny", "org/model")]
)
def test_a_tokenizer_of_the_hub_is_told_before_it_is_asked_for(
    base_model: str, source: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def asked(tokenizer: str, **_: object) -> None:
        assert (tokenizer, caplog.messages) == (
            "org/model",
            ["getting the tokenizer of 'org/model' from the Hugging Face Hub"],
        )
        raise OSError("there is none")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", asked)
    monkeypatch.setattr(tinker.SamplingClient, "get_base_model", lambda _: base_model)
    monkeypatch.setattr(tinker.SamplingClient, "get_tokenizer", lambda _: _load_tokenizer_from_model_info(base_model))
    with pytest.raises(
        ConfigError, match="cannot be loaded: there is none; give the directory or the Hub id of the model's tokenizer"
    ):
        tokenizer_of(source, object.__new__(tinker.SamplingClient))
