"""The command line, as a person types it.

Invariant: No process imports what lies in the working directory.
Also: `tests/test_architecture.py`, `tests/distributed/test_ray.py`.
"""

import inspect
import os
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from tests.preloaded import REAL_PYTHON
from tests.running import tinsmith, tinsmith_here
from tinsmith import __version__
from tinsmith.cli import app
from tinsmith.config import settings
from tinsmith.errors import ConfigError
from tinsmith.server.engine_program import ENGINE


def test_version() -> None:
    ran = tinsmith("--version")
    assert (ran.returncode, ran.stdout) == (0, f"tinsmith {__version__}\n")


def test_serve_offers_every_setting_with_choices_unit_and_default() -> None:
    """With --help-all by section; --help has some twenty common ones."""
    whole, short = (
        re.sub(r"\s+", " ", CliRunner().invoke(app, ["serve", option]).output) for option in ("--help-all", "--help")
    )
    section = ""
    for setting in settings():
        if len(setting.path) > 1 and setting.path[0] != section:
            section = setting.path[0]
            assert f" Section {section}: {setting.option}" in whole
        value = f" {setting.accepted}" if setting.accepted else f" / {setting.refused}" * bool(setting.refused)
        row = f" {setting.option}{value} {setting.described}"
        assert row in whole
        assert (row in short) == setting.info.common
        assert all(unit in row for unit in (setting.info.unit, str(setting.default) if setting.default else ""))
    assert 20 <= sum(setting.info.common for setting in settings()) <= 26
    assert "--base-model TEXT" in short
    assert "--config FILE.yaml" in short
    assert "--sampler local|vllm|none" in short
    assert "--help-all Show all settings" in short


def test_a_switch_that_is_on_can_be_switched_off() -> None:
    refused = tinsmith_here("serve", "--no-stand-by", "--base-model", "a=/no/such/place")
    assert "there is no directory '/no/such/place'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "tinsmith: no base model to serve; give at least one --base-model [NAME=]PATH_OR_HUB_ID\n"),
        (["--base-model", "a=/no/such/place"], "tinsmith: base_models: 'a=/no/such/place': there is no directory"),
        (["--base-model", "a=org/x", "--base-model", "a=org/y"], "tinsmith: base_models: two have the name 'a'"),
        (["--port", "70000"], "tinsmith: command line: --port='70000' must be a whole number from 0 to 65535\n"),
        (
            ["--base-model", "org/x", "--sampler", "vllm", "--vllm-python", "/no/python"],
            (
                "tinsmith: vllm_python='/no/python' is no Python that can be run; "
                "name the one of the environment with vLLM, such as "
                "DIR/bin/python\n"
            ),
        ),
        (
            ["--base-model", "org/x", "--vllm-url", "http://127.0.0.1:1"],
            "tinsmith: --vllm-url has no effect with sampler=local; add --sampler vllm, or leave it out\n",
        ),
        (
            ["--base-model", "org/x", "--train", "none", "--planned-rank", "8"],
            "tinsmith: --planned-rank has no effect with train=none; leave it out, or let the server train\n",
        ),
        (
            ["--base-model", "org/x", "--train", "none", "--sampler", "none"],
            "tinsmith: train=none is not possible with sampler=none: nothing would be left to serve\n",
        ),
        (
            [
                "--base-model",
                "org/x",
                "--train",
                "none",
                "--sampler",
                "vllm",
                "--memory-share",
                "0.5",
                "--vllm-url",
                "http://127.0.0.1:1",
            ],
            (
                "tinsmith: memory_share=0.5 has no effect with train=none and vllm_urls, with which this server uses "
                "no GPU; leave it out\n"
            ),
        ),
        (
            ["--base-model", "org/x", "--sampler", "vllm", "--train", "none", "--vllm-turn-s", "5"],
            (
                "tinsmith: vllm_turn_s=5 has no effect with train=none, where vLLM servers never wait for a trainer; "
                "leave it out\n"
            ),
        ),
        (
            ["--base-model", "org/x", "--sampler", "vllm", "--vllm-url", "http://127.0.0.1:1", "--vllm-turn-s", "5"],
            (
                "tinsmith: vllm_turn_s=5 is possible only with vLLM servers that Tinsmith starts; "
                "leave it or vllm_urls out\n"
            ),
        ),
        (
            ["--base-model", "org/x", "--sampler", "vllm", "--deterministic"],
            (
                "tinsmith: deterministic=True is not possible with sampler=vllm, which computes in an order of its "
                "own; use --sampler local\n"
            ),
        ),
        (
            ["--base-model", "org/x", "--device", "cpu", "--sequence-parallel-from", "1000"],
            (
                "tinsmith: sequence_parallel_from has no effect with one worker; "
                "add --workers 2 or more, or leave it out\n"
            ),
        ),
        (
            ["--base-model", "org/x", "--sequence-parallel-from", "1000", "--workers", "2", "--deterministic"],
            (
                "tinsmith: sequence_parallel_from is not possible with deterministic=True, which computes each "
                "sequence on one worker\n"
            ),
        ),
        (["--config", "/no/such/file.yaml"], "tinsmith: cannot read the configuration file /no/such/file.yaml"),
    ],
)
def test_serve_refuses_what_cannot_work_in_one_line(arguments: list[str], complaint: str) -> None:
    ran = tinsmith_here("serve", *arguments)
    assert ran.returncode == 2
    assert ran.stderr.startswith(complaint)
    assert ran.stderr.count("\n") == 1


def test_an_unknown_option_is_refused() -> None:
    assert "No such option: --prot (Possible options: --host, --port)" in tinsmith_here("serve", "--prot", "1").stderr


def test_options_override_environment_variables_which_override_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "tinsmith.yaml"
    file.write_text("base_models: [a=/no/first]\n")
    assert "'a=/no/first'" in tinsmith_here("serve", "--config", str(file)).stderr
    monkeypatch.setenv("TINSMITH_CONFIG", str(file))
    assert "'a=/no/first'" in tinsmith_here("serve").stderr
    monkeypatch.setenv("TINSMITH_BASE_MODELS", "b=/no/second")
    assert "'b=/no/second'" in tinsmith_here("serve").stderr
    assert "'c=/no/third'" in tinsmith("serve", "--base-model", "c=/no/third").stderr


def test_every_option_and_argument_of_every_command_has_help() -> None:
    group = typer.main.get_group(app)
    without = [
        f"{name} {parameter.name}"
        for name, command in group.commands.items()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert len(group.commands) > 10
    assert without == []


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-5-moe"])
def test_tiny_model_writes_a_model_and_says_how_to_serve_it(tmp_path: Path, kind: str) -> None:
    directory = tmp_path / "made" / "model"
    ran = tinsmith_here("tiny-model", kind, str(directory), "--vocab", "512", "--hidden", "32", "--layers", "1")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"tinsmith serve --base-model tiny={directory}" in ran.stdout
    assert (directory / "model.safetensors").is_file()


IMPORTED = """
import sys
from tinsmith.cli import main
try:
    main()
finally:
    slow = {"torch", "transformers", "numpy", "pydantic", "fastapi", "uvicorn", "sqlalchemy", "tinker"}
    print("", *(slow & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("arguments", "code", "modules"),
    [
        (["--help"], 0, set()),
        (["export", "tinker://a/weights/b", "new"], 2, {"pydantic", "sqlalchemy"}),
        (["import", "adapter", "name", "--base-model", "org/model"], 2, {"pydantic", "sqlalchemy"}),
    ],
)
def test_what_can_be_said_at_once_imports_nothing_slow(
    arguments: list[str], code: int, modules: set[str], tmp_path: Path
) -> None:
    """Help is there in 0.2 s then, on a quiet core."""
    command = [REAL_PYTHON, "-c", IMPORTED, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert set(done.stdout.splitlines()[-1].split()) <= modules, done.stderr
    if code:
        missing = (
            "tinsmith: data_dir=tinsmith-data holds no data of a server (there is no tinsmith.db in it); "
            "name its --data-dir\n"
        )
        assert done.stderr == missing


UP_TO_TORCH = """
import os, sys
from tinsmith.cli import main
class Torch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch":
            os._exit(9)
sys.meta_path.insert(0, Torch)
main()
"""


def test_doctor_tells_of_damaged_files_before_it_imports_torch(tmp_path: Path) -> None:
    """That takes seconds, up to fifteen."""
    (tmp_path / "config.json").write_text("{")
    command = [
        REAL_PYTHON,
        "-c",
        UP_TO_TORCH,
        "doctor",
        "--base-model",
        f"a={tmp_path}",
        "--base-model",
        f"b={tmp_path}",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (ran.returncode, ran.stderr) == (9, "")
    damaged = f"{tmp_path / 'config.json'} "
    assert [line.partition(damaged)[0] for line in ran.stdout.splitlines()] == ["a: ", "b: "]


WITHOUT = """
import sys
sys.modules["tinsmith_rl"] = None
from tinsmith.cli import main
main()
"""


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_rl_without_its_package_says_how_to_install_it(command: str, tmp_path: Path) -> None:
    here = str(Path(__file__).parent.parent)
    told = "reinforcement learning is a package of its own, tinsmith-rl"
    ran = subprocess.run(
        [REAL_PYTHON, "-c", WITHOUT, command, "run.yaml"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": here},
    )
    assert (ran.returncode, ran.stderr) == (2, f"tinsmith: {told}: pip install -e '{here}/rl'\n")


@pytest.mark.parametrize("safe", [True, False])
def test_a_process_of_a_server_runs_nothing_that_lies_in_the_working_directory(safe: bool, tmp_path: Path) -> None:
    """It ends for lack of arguments, and would end by each of these files.

    That all are started like this: tests/test_architecture.py.
    """
    for name in ("random.py", "queue.py", "torch.py", "tinsmith/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os\nos._exit(9)\n")
    command = [REAL_PYTHON, *(part for part in ENGINE[1:] if safe or part != "-P")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "sys.argv[1]" in done.stderr) == ((1, True) if safe else (9, False)), done.stderr


@pytest.mark.parametrize("safe", [[], ["-P"]])
def test_a_stand_in_for_python_imports_from_where_python_does(safe: list[str], tmp_path: Path) -> None:
    """Else the tests would see another path than processes have."""
    (tmp_path / "own.py").write_text("print('run')")
    done = subprocess.run(
        [sys.executable, *safe, "-m", "own"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout == ("" if safe else "run\n")


def test_a_place_that_cannot_be_written_is_said_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for command in (("tiny-model", "qwen3"), ("export", "tinker://a/weights/b")):
        ran = tinsmith_here(*command, str(file))
        assert (ran.returncode, ran.stderr) == (2, f"tinsmith: {file} is not an empty directory; name a new one\n")
    made = tinsmith_here("tiny-model", "qwen3", str(file / "below"))
    assert (made.returncode, made.stderr) == (2, f"tinsmith: {file / 'below'}: Not a directory\n")
    assert file.read_text() == "mine"


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "tinker://a/weights/b", "new"],
        ["import", "adapter", "name", "--base-model", "org/model"],
        ["backup", "new"],
        ["restore", "old"],
    ],
)
def test_what_writes_a_directory_ends_in_order(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first moment on. That what is half written is deleted: tests/commands/test_exchange.py."""
    monkeypatch.chdir(tmp_path)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        assert isinstance(CliRunner().invoke(app, arguments).exception, ConfigError)
        for number in before:
            handler = signal.getsignal(number)
            assert callable(handler)
            with pytest.raises(SystemExit, match=str(128 + number)):
                handler(number, None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_every_path_may_begin_with_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves `~/` as it is behind a `=` and in a variable."""
    monkeypatch.setenv("HOME", "/home/her")
    read = {}
    for command in app.registered_commands:
        assert command.callback is not None
        for parameter in inspect.signature(command.callback).parameters.values():
            kind, *infos = typing.get_args(parameter.annotation)
            if kind in (Path, Path | None):
                read[command.callback.__name__, parameter.name] = infos[0].parser("~/x/") if infos[0].parser else None
    assert len(read) > 12
    assert set(read.values()) == {Path("/home/her/x")}, read


@pytest.mark.parametrize("command", ["backup", "gc", "recover"])
def test_a_directory_without_data_is_refused(command: str, tmp_path: Path) -> None:
    target = [str(tmp_path / "copy")] if command == "backup" else []
    (tmp_path / "empty").mkdir()
    done = tinsmith_here(command, *target, "--data-dir", str(tmp_path / "empty"))
    assert (done.returncode, "holds no data of a server" in done.stderr) == (2, True)
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]
