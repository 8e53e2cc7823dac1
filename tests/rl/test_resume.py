"""A run that is killed and started again loses nothing, and a directory takes no other run than the one that it holds.

Invariant: A killed RL run that is started again keeps metrics and best weights, and goes on with no other settings; a
run outlives its server and its workers.
"""

import json
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import tinker
from rich.console import Console

from tests.databases import run_sql
from tests.rl.test_run import QUIET, chatty, config_of, logged
from tests.running import PROGRAM, serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith_rl.config import RlConfig, to_tree
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.resume import (
    FIXED_AT_START,
    MAY_CHANGE,
    MAY_DIFFER,
    RunState,
    load_state,
    locked,
    record_settings,
    starting_state,
)
from tinsmith_rl.trainer import train

KEY = "tml-resume"
SILENT = "http://127.0.0.1:9"
"""Where nobody answers: what is refused is refused before the server is asked."""


def state_of(directory: Path) -> RunState:
    state = load_state(directory)
    assert state is not None
    return state


@pytest.mark.timeout(900)  # three processes, each of which imports the SDK and transformers
def test_a_killed_run_that_is_started_again_goes_on_and_keeps_its_best_weights(server_url: str, tmp_path: Path) -> None:
    out, file, plan = tmp_path / "out", tmp_path / "run.yaml", tmp_path / "plan"
    file.write_text(
        f"server: {{url: '{server_url}', api_key: {KEY}}}\nmodel: {{base_model: tiny, rank: 4}}\n"
        f"env: {{name: 'tests.rl.moody:Chatty', options: {{plan: {plan}}}}}\ngeneration: {{max_tokens: 3}}\n"
        f"training: {{steps: 6, groups: 1, group_size: 2}}\noutput: {{directory: {out}, save_every: 3}}\n"
    )

    def started(dies_in_step: int | None) -> "subprocess.CompletedProcess[str]":
        """`tinsmith rl` in a process of its own, which gets SIGKILL in the given one of its steps, of two episodes
        each."""
        plan.unlink(missing_ok=True)
        if dies_in_step is not None:
            plan.write_text(str(dies_in_step * 2 + 1))
        return subprocess.run([*PROGRAM, "rl", str(file)], capture_output=True, text=True, check=False, timeout=600)

    def on_server() -> set[str]:
        """The paths of all checkpoints. The server belongs to all tests of this room, whatever their keys are."""
        rest = tinker.RestClient(base_url=server_url, api_key=KEY)
        return {checkpoint.tinker_path for checkpoint in rest.list_user_checkpoints(limit=1000).result().checkpoints}

    of_other_tests = on_server()
    # Killed before the first checkpoint: there is nothing to go on with, and nothing of it may go.
    assert started(dies_in_step=2).returncode == -signal.SIGKILL
    first, lines = state_of(out), (out / "metrics.jsonl").read_text()
    assert [line["step"] for line in logged(out)] == [1, 2]
    assert (first.weights, first.best_weights in on_server()) == ("", True)
    # Killed after the first checkpoint.
    again = started(dies_in_step=5)
    assert again.returncode == -signal.SIGKILL
    moved = (
        f"the run in {out} ended before its first checkpoint, so a new run begins; "
        f"its files were moved to {out / 'ended-1'}"
    )
    assert moved in again.stdout
    assert (out / "ended-1" / "metrics.jsonl").read_text() == lines
    assert state_of(out / "ended-1") == first
    second = state_of(out)
    assert second.step == 3
    assert [line["step"] for line in logged(out)] == [1, 2, 3, 4, 5]
    assert {first.best_weights, second.best_weights} <= on_server()
    # Started a third time, it goes on to its end.
    third = started(None)
    assert (third.returncode, third.stderr) == (0, "")
    assert ("step    4" in third.stdout, "step    3" in third.stdout) == (True, False)
    assert [line["step"] for line in logged(out)] == [1, 2, 3, 4, 5, 6]
    last = state_of(out)
    assert last.step == 6
    assert on_server() - of_other_tests == {first.best_weights} | last.paths


@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_run_goes_on_when_its_worker_and_its_server_are_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_lost: bool
) -> None:
    """Its model comes back; if not, as after a power cut, it goes on from its last state.

    Its metrics have every step once.
    """
    write_tiny_model("qwen3", tmp_path / "tiny")
    options = ["--base-model", f"tiny={tmp_path / 'tiny'}", "--kv-cache-gib", "0.1"]
    out = tmp_path / "out"
    with serving(tmp_path, *options) as server, ThreadPoolExecutor(1) as threads:
        url = server.url  # which is read from the log
        sections: dict[str, dict[str, Any]] = {
            "model": {"tokenizer": str(tmp_path / "tiny")},
            "env": {"name": "arithmetic", "options": {"delay_s": 0.1}},
            "training": {"steps": 20},
            "output": {"save_every": 2},
        }
        running = threads.submit(train, chatty(url, out, **sections), QUIET)

        def wait_for(step: int) -> None:
            while not running.done() and (not (out / "metrics.jsonl").exists() or len(logged(out)) < step):
                time.sleep(0.02)

        wait_for(3)
        os.kill(server.worker_pid(), signal.SIGKILL)
        wait_for(6)
        server.process.kill()
        server.process.wait()
        if is_lost:
            run_sql(tmp_path / "data", "DELETE FROM history_events", "DELETE FROM histories")
        with serving(tmp_path, *options, "--port", url.rpartition(":")[2]) as again:
            again.wait_for_health()
            state = running.result()
    assert [line["step"] for line in logged(out)] == list(range(1, 21))
    assert (state.step, state) == (20, state_of(out))
    losses = [record.getMessage() for record in caplog.records if record.name == "tinsmith_rl.trainer"]
    assert any("the server has lost weights or the model" in loss for loss in losses) or not is_lost
    goes_on = r"the run goes on from step \d+ with its last checkpoint, tinker://"
    assert any(re.search(goes_on, loss) for loss in losses) == is_lost


def run_of(directory: Path, done: int, **sections: dict[str, Any]) -> RlConfig:
    """A configuration of four steps with these changes, and a directory with a run of it that has `done` some."""
    record_settings(config_of(SILENT, directory))
    RunState(step=done, weights="tinker://run/weights/step").save(directory)
    return config_of(SILENT, directory, **sections)


def refused(config: RlConfig) -> str:
    """Why a run does not begin."""
    with pytest.raises(ConfigError) as raised:
        train(config, QUIET)
    return str(raised.value)


NEW, ALLOWED = (
    "; take --new, or name another directory",
    ", or change them from step 2 on with output: {{allow_changes: [{}]}}",
)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"training": {"seed": 1}}, f"training.seed is 0 there and 1 here{NEW}{ALLOWED.format('training.seed')}"),
        (
            {"env": {"options": {"level": "easy"}}, "model": {"rank": 4}},
            f"model.rank is 8 there and 4 here, env.options is {{}} there and {{'level': 'easy'}} here{NEW}",
        ),
        (
            {
                "training": {"seed": 1, "learning_rate": 1.0, "epochs": 2},
                "output": {"allow_changes": ["training.seed"]},
            },
            f"training.epochs is 1 there and 2 here{NEW}{ALLOWED.format('training.epochs')}",
        ),
    ],
)
def test_another_configuration_does_not_go_on_with_the_run(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    config = run_of(tmp_path, 2, **changes)
    before = (tmp_path / "config.json").read_text()
    assert refused(config) == f"output: directory='{tmp_path}' holds a run with other settings: {complaint}"
    assert (tmp_path / "config.json").read_text() == before


def test_settings_that_do_not_change_the_run_may_differ_and_others_if_they_are_named(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "server": {"url": "http://127.0.0.1:10"},
        "env": {"workers": "thread", "worker_count": 3, "timeout_s": 1},
        "generation": {"in_flight": 3},
        "training": {"steps": 40, "learning_rate": 1.0, "seed": 7},
        "evaluation": {"model": "tinker://there", "pass_at": [1]},
        "output": {"keep": 1, "save_every": 1, "trackers": ["console"], "allow_changes": ["training.seed"]},
    }
    console = Console(record=True, width=40, file=StringIO())
    config = run_of(tmp_path, 2, **changes)
    settings = json.loads((tmp_path / "config.json").read_text())
    # What a later version added counts as its default
    del settings["training"]["tis_cap"], settings["output"]["allow_changes"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert starting_state(config, console).step == 2
    assert console.export_text() == (
        "from step 3 on, training.seed is 7 (it was 0)\nfrom step 3 on, training.learning_rate is 1.0 (it was 0.001)\n"
    )


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        (
            "training.lerning_rate",
            "there is no setting 'training.lerning_rate'; write SECTION.KEY, such as training.learning_rate",
        ),
        *(
            (key, f"{key} takes effect only when a run begins; name another output directory")
            for key in ("model.rank", "warmup.steps")
        ),
    ],
)
def test_a_change_that_cannot_be_is_refused(tmp_path: Path, key: str, complaint: str) -> None:
    assert refused(run_of(tmp_path, 2, output={"allow_changes": [key]})) == f"output: allow_changes: {complaint}"
    settings = {f"{section}.{name}" for section, values in to_tree(RlConfig()).items() for name in values}
    assert all(
        any(fnmatchcase(name, named) for name in settings) for named in (*MAY_DIFFER, *MAY_CHANGE, *FIXED_AT_START)
    )


def test_broken_files_are_named(tmp_path: Path) -> None:
    config, error = (
        run_of(tmp_path, 2),
        "Expecting value: line 1 column 1 (char 0); restore it, or name another output directory",
    )
    (tmp_path / "config.json").write_text("")
    assert refused(config) == f"cannot read {tmp_path / 'config.json'}, the settings of the run in {tmp_path}: {error}"
    (tmp_path / "state.json").write_text("")
    assert refused(config) == f"{tmp_path / 'state.json'}, the state of a run, is broken: {error}"


def test_two_runs_do_not_work_in_one_directory_and_one_that_is_done_says_how_to_go_on(tmp_path: Path) -> None:
    config, console = run_of(tmp_path, 4), Console(record=True, width=40, file=StringIO())
    with locked(tmp_path):
        assert (
            refused(config)
            == f"output: directory='{tmp_path}': a run is at work in it; end that, or name another directory"
        )
    assert train(config, console).step == 4
    assert console.export_text() == f"the run in {tmp_path} has done its 4 steps; raise training: steps to go on\n"


def test_what_a_link_in_the_place_of_the_lock_leads_to_is_neither_locked_nor_made(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=f"symbolic links: '{tmp_path / 'run' / 'run.lock'}'"), locked(tmp_path / "run"):
        pass
    assert not (tmp_path / "precious").exists()


def test_what_a_run_without_a_checkpoint_left_is_moved_aside_or_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()  # of a run that could not begin
    (tmp_path / "config.json").write_text("{}")
    config = config_of(SILENT, tmp_path)
    assert starting_state(config, QUIET) == RunState()
    assert not list(tmp_path.glob("ended-*"))
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f'{{"step": {number}}}\n')
        (tmp_path / "trajectories").mkdir()
        left = f"output: directory='{tmp_path}' holds a run, and resume is false; take --new, or name another directory"
        assert refused(config_of(SILENT, tmp_path, output={"resume": False})) == left
        assert starting_state(config, QUIET) == RunState()
    assert [(tmp_path / f"ended-{number}" / "metrics.jsonl").read_text() for number in (1, 2)] == [
        '{"step": 1}\n',
        '{"step": 2}\n',
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"ended-1", "ended-2", "run.lock"}
