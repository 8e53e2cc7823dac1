"""What a start of `tinsmith rl` makes of its output directory: a new run, the rest of the run that is in it, or an error.

Two runs in one directory would delete each other's checkpoints, so each holds a lock, which ends with its process.

A run that was killed goes on from its last checkpoint. If it had saved none, a new run begins, and the files of the old one are moved into
a directory of their own: neither its metrics nor its weights on the server are lost. A run goes on only with the settings that it began
with; the constants below name the exceptions.
"""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tinsmith.errors import ConfigError
from tinsmith.rl.config import RlConfig, to_tree
from tinsmith.rl.run_state import FILE, RunState, load_state

SETTINGS = "config.json"
"""The settings that the run in a directory had at its last start."""
METRICS = "metrics.jsonl"

FREE = (
    "server.*",
    "env.workers",
    "env.worker_count",
    "env.timeout_s",
    "env.max_failed_*",
    "generation.in_flight",
    "training.steps",
    "evaluation.model",
    "evaluation.pass_at",
    "output.*",
)
"""Settings that may differ from one start to the next: they decide how long a run is, where it computes and what it writes."""

FROM_THE_BEGINNING = ("model.base_model", "model.start_from", "model.rank", "model.seed", "warmup.*")
"""Settings that take effect only when a run begins, so a run that goes on cannot change them."""

_LEFT_BY_A_RUN = (FILE, SETTINGS, METRICS, "trajectories", "tensorboard")


def starting_state(config: RlConfig, console: Console) -> RunState:
    """The state to go on from; step 0 is a new run, whose output directory is then empty of other runs' files.

    Raises ConfigError: the directory holds a run and `resume` is false, or a run with other settings.
    """
    directory = Path(config.output.directory)
    settings = _settings(config)
    _check_allowed_changes(config.output.allow_changes, settings)
    state = load_state(directory)
    if state is None and not _has_metrics(directory):
        return RunState()
    if not config.output.resume:
        raise ConfigError(f"output: directory={str(directory)!r} holds a run, and resume is false; name another directory")
    if state is None or not state.step:
        kept = _move_aside(directory)
        moved = f"the run in {directory} ended before its first checkpoint and begins anew; what it left is in {kept}"
        console.print(Text(moved), soft_wrap=True)
        return RunState()
    _check_same_run(directory, state.step, settings, config.output.allow_changes)
    return state


@contextmanager
def only_run(directory: Path) -> Iterator[None]:
    """Hold an output directory, made if it is not there, while the body runs. Raises ConfigError if another run works in it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "run.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output: directory={str(directory)!r}: a run is at work in it; end that, or name another directory"
            ) from error
        yield


def record_settings(config: RlConfig) -> None:
    """Write down what the next start in the output directory compares its settings with. Called once the run can begin."""
    file = Path(config.output.directory) / SETTINGS
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(to_tree(config), indent=2) + "\n", encoding="utf-8")
    new.replace(file)


def _settings(config: RlConfig) -> dict[str, Any]:
    """By "section.key", with values as they are read back from JSON."""
    return _flat(json.loads(json.dumps(to_tree(config))))


def _has_metrics(directory: Path) -> bool:
    """Whether a run has done a step or an evaluation. One that could not begin may leave an empty file."""
    file = directory / METRICS
    return file.exists() and file.stat().st_size > 0


def _check_allowed_changes(keys: list[str], settings: dict[str, Any]) -> None:
    for key in keys:
        if key not in settings:
            raise ConfigError(f"output: allow_changes: there is no setting {key!r}; write SECTION.KEY, such as training.learning_rate")
        if _is_one_of(key, FROM_THE_BEGINNING):
            raise ConfigError(f"output: allow_changes: {key} takes effect only when a run begins; name another output directory")


def _check_same_run(directory: Path, step: int, settings: dict[str, Any], allowed: list[str]) -> None:
    """Raise ConfigError if the run in the directory has other settings than these, FREE and `allowed` ones aside."""
    file = directory / SETTINGS
    try:
        recorded = _flat(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:  # not there, no JSON, no sections
        raise ConfigError(
            f"cannot read {file}, the settings of the run in {directory}: {error}; restore it, or name another output directory"
        ) from error
    before = _settings(RlConfig()) | recorded  # a setting that the recording version did not have did what its default says
    changed = [key for key, value in settings.items() if before[key] != value and not _is_one_of(key, FREE) and key not in allowed]
    if not changed:
        return
    differences = ", ".join(f"{key} is {before[key]!r} there and {settings[key]!r} here" for key in changed)
    remedy = "name another directory"
    if not any(_is_one_of(key, FROM_THE_BEGINNING) for key in changed):
        remedy += f", or change them from step {step} on with output: {{allow_changes: [{', '.join(changed)}]}}"
    raise ConfigError(f"output: directory={str(directory)!r} holds a run with other settings: {differences}; {remedy}")


def _move_aside(directory: Path) -> Path:
    """Move what a run has written into a new directory below, and return that."""
    number = 1
    while (kept := directory / f"ended-{number}").exists():
        number += 1
    kept.mkdir()
    for name in _LEFT_BY_A_RUN:
        if (directory / name).exists():
            (directory / name).rename(kept / name)
    return kept


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{"training.steps": 100} and so on."""
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}


def _is_one_of(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
