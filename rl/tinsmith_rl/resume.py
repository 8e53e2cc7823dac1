"""Continues a run that was stopped or killed: its state, its checkpoints on the server, and its output directory.

`state.json` in the output directory says where a run continues. A checkpoint is saved first and recorded there
afterwards, and it is deleted only after `state.json` has ceased to name it, so at any moment the file names checkpoints
that exist.

A run that was killed continues from its last checkpoint. If it had saved none, a new run begins, and the files of the
old one are moved to a directory of their own, so that neither its metrics nor its weights on the server are lost. A run
continues only with the settings that it began with; `MAY_DIFFER`, `MAY_CHANGE` and `FIXED_AT_START` name the
exceptions. Two runs in one directory would delete each other's checkpoints, so a run locks its directory.
"""

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import tinker
from rich.console import Console
from rich.text import Text

from tinsmith_rl.config import RlConfig, to_tree
from tinsmith_rl.errors import ConfigError, config_error, translated

STATE = "state.json"
SETTINGS = "config.json"
"""The settings of the run at its last start."""
METRICS = "metrics.jsonl"
_RESTORE = "restore it, or name another output directory"
_FILES_OF_A_RUN = (STATE, SETTINGS, METRICS, "trajectories", "tensorboard")

MAY_DIFFER = (
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
"""Settings that may differ from start to start: they decide a run's length, place and output, not its results."""

MAY_CHANGE = (
    "training.learning_rate",
    "training.decay",
    "training.warmup_steps",
    "training.weight_decay",
    "training.grad_clip_norm",
)
"""Settings of the optimizer. A run that continues takes their new values, and says so."""

FIXED_AT_START = ("model.base_model", "model.start_from", "model.rank", "model.seed", "warmup.*")
"""Settings that have an effect only when a run begins, so a run that continues cannot change them."""


@dataclass(frozen=True)
class RunState:
    """A run after `step` steps."""

    step: int = 0
    next_group: int = 0
    """Number of the first group that was not trained on."""
    weights: str = ""
    """Checkpoint for training (tinker://...), with the optimizer's state."""
    sampler_weights: str = ""
    """Checkpoint of the same weights for sampling."""
    best_reward: float | None = None
    best_step: int = 0
    best_weights: str = ""
    """Checkpoint for sampling with the best reward."""
    kept: tuple[str, ...] = ()
    """Checkpoints on the server, oldest first: two for each step, including `weights` and `sampler_weights`."""
    tokenizer: str = ""
    """Directory or Hub id."""
    home: str = ""
    """The directory of the run, as `home_of` names it. In a copy of the directory it is another one."""
    others: tuple[str, ...] = ()
    """Checkpoints that were saved by a run in another directory, of which this one is a copy."""

    @property
    def paths(self) -> frozenset[str]:
        """Every checkpoint that the state names."""
        return frozenset({self.weights, self.sampler_weights, self.best_weights, *self.kept} - {""})

    def save(self, directory: Path) -> None:
        """Replace the state in `directory`, at once and as a whole."""
        _replace_file(directory / STATE, dataclasses.asdict(self))


def load_state(directory: Path) -> RunState | None:
    """The state in `directory`; None if there is none.

    Raises ConfigError if it is broken or was written by another version.
    """
    file = directory / STATE
    if not file.exists():
        return None
    with config_error(f"{file}, the state of a run, is broken", ValueError, remedy=_RESTORE):
        values = json.loads(file.read_text(encoding="utf-8"))
    known = {spec.name for spec in dataclasses.fields(RunState)}
    if not isinstance(values, dict) or set(values) - known or "step" not in values:
        raise ConfigError(
            f"{file} was written by another version: its keys are {sorted(values)}, expected {sorted(known)}"
        )
    return RunState(**{**values, **{name: tuple(values.get(name, ())) for name in ("kept", "others")}})


def home_of(directory: Path) -> str:
    """The identity of a directory, which a copy of it does not share."""
    return f"{directory.resolve()} ({directory.stat().st_ino})"


@dataclass
class RunCheckpoints:
    """Saves a run's checkpoints, records them in state.json, and deletes those that it names no longer.

    It deletes only what its own run has saved. A copy of an output directory names checkpoints of the run that it was
    copied from; these stay. So does a checkpoint that a run had saved and not recorded when it was killed.
    """

    client: tinker.TrainingClient
    rest: tinker.RestClient
    directory: Path
    keep: int
    """The number of steps whose checkpoints stay, besides the best weights; 0 deletes nothing."""
    recorded: RunState
    """The content of state.json."""

    def __post_init__(self) -> None:
        self._own = (
            set(self.recorded.paths.difference(self.recorded.others))
            if self.recorded.home == home_of(self.directory)
            else set()
        )

    async def save_step(self, state: RunState) -> RunState:
        """Save the weights after `state.step` steps, for training and for sampling.

        They take effect with the next `record`.
        """
        name = f"step-{state.step:06d}"
        weights = (await self.client.save_state(name, overwrite=True)).path
        sampler_weights = (await self.client.save_weights_for_sampler(name)).path
        self._own |= {weights, sampler_weights}
        kept = (*state.kept, weights, sampler_weights)[-2 * self.keep :]
        return replace(state, weights=weights, sampler_weights=sampler_weights, kept=kept)

    async def save_best(self, state: RunState, reward: float) -> RunState:
        """Save the weights after `state.step` steps as the best so far, and record them.

        The step to continue from stays the same.
        """
        path = (await self.client.save_weights_for_sampler(f"best-{state.step:06d}")).path
        self._own.add(path)

        def with_best(old: RunState) -> RunState:
            best = {"best_reward": reward, "best_step": state.step, "best_weights": path}
            return replace(old, **best, tokenizer=state.tokenizer, home=state.home)

        await self.record(with_best(self.recorded))
        return with_best(state)

    async def record(self, state: RunState) -> None:
        """Let a resumed run continue from `state`, and delete the checkpoints of this run that it does not name."""
        dropped = (self.recorded.paths - state.paths) & self._own
        state = replace(state, others=tuple(sorted(state.paths - self._own)))
        state.save(self.directory)
        self.recorded = state
        if self.keep:
            for path in sorted(dropped):
                with suppress(tinker.NotFoundError):  # somebody else deleted it
                    await self.rest.delete_checkpoint_from_tinker_path(path)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock an output directory, created if it does not exist. Raises ConfigError if another run holds the lock.

    The operating system releases the lock when the process ends, however it ends.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / "run.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)  # a link may lead to any file
    with os.fdopen(file, "w") as lock:
        taken = f"output: directory={str(directory)!r}: a run is at work in it; end that, or name another directory"
        with translated(BlockingIOError, lambda _: ConfigError(taken)):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def starting_state(config: RlConfig, console: Console) -> RunState:
    """The state to continue from. For a new run it is step 0, and the output directory holds no files of another run.

    Raises ConfigError if the directory holds a run and `resume` is false, or if that run has other settings.
    """
    directory = Path(config.output.directory)
    settings = _settings(config)
    _check_allowed_changes(config.output.allow_changes, settings)
    state = load_state(directory)
    if state is None and not _has_metrics(directory):
        return RunState()
    if not config.output.resume:
        raise ConfigError(
            f"output: directory={str(directory)!r} holds a run, and resume is false; "
            "take --new, or name another directory"
        )
    if state is None or not state.step:
        moved_to = _move_aside(directory)
        message = (
            f"the run in {directory} ended before its first checkpoint, so a new run begins; "
            f"its files were moved to {moved_to}"
        )
        console.print(Text(message), soft_wrap=True)
        return RunState()
    for change in _changes(directory, state.step, settings, config.output.allow_changes):
        console.print(Text(f"from step {state.step + 1} on, {change}"), soft_wrap=True)
    return state


def record_settings(config: RlConfig) -> None:
    """Record the settings that the next start in this directory is compared with.

    Called once the run is ready to begin.
    """
    _replace_file(Path(config.output.directory) / SETTINGS, to_tree(config))


def _replace_file(file: Path, tree: dict[str, Any]) -> None:
    """Write JSON under another name and rename it, so that a process killed meanwhile leaves the old file."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    new.replace(file)


def _settings(config: RlConfig) -> dict[str, Any]:
    """The settings by "section.key", with values as they are read back from JSON."""
    return _flat(json.loads(json.dumps(to_tree(config))))


def _has_metrics(directory: Path) -> bool:
    """Whether a run has logged a step or an evaluation. One that could not begin leaves an empty file."""
    file = directory / METRICS
    return file.exists() and file.stat().st_size > 0


def _check_allowed_changes(keys: list[str], settings: dict[str, Any]) -> None:
    for key in keys:
        if key not in settings:
            raise ConfigError(
                f"output: allow_changes: there is no setting {key!r}; write SECTION.KEY, such as training.learning_rate"
            )
        if _matches(key, FIXED_AT_START):
            raise ConfigError(
                f"output: allow_changes: {key} takes effect only when a run begins; name another output directory"
            )


def _changes(directory: Path, step: int, settings: dict[str, Any], allowed: list[str]) -> list[str]:
    """Describe the settings that changed, apart from MAY_DIFFER.

    Raises ConfigError for what is neither in MAY_CHANGE nor `allowed`.
    """
    file = directory / SETTINGS
    what = f"cannot read {file}, the settings of the run in {directory}"
    with config_error(what, OSError, ValueError, AttributeError, remedy=_RESTORE):  # no file, not JSON, or not sections
        recorded = _flat(json.loads(file.read_text(encoding="utf-8")))
    # Settings that are newer than the recorded file had the effect of their defaults
    before = _settings(RlConfig()) | recorded
    different = [key for key, value in settings.items() if before[key] != value and not _matches(key, MAY_DIFFER)]
    changed = [key for key in different if not _matches(key, MAY_CHANGE) and key not in allowed]
    if not changed:
        return [f"{key} is {settings[key]!r} (it was {before[key]!r})" for key in different]
    differences = ", ".join(f"{key} is {before[key]!r} there and {settings[key]!r} here" for key in changed)
    remedy = "take --new, or name another directory"
    if not any(_matches(key, FIXED_AT_START) for key in changed):
        remedy += f", or change them from step {step} on with output: {{allow_changes: [{', '.join(changed)}]}}"
    raise ConfigError(f"output: directory={str(directory)!r} holds a run with other settings: {differences}; {remedy}")


def _move_aside(directory: Path) -> Path:
    """Move a run's files into a new directory below. Returns that directory."""
    number = 1
    while (aside := directory / f"ended-{number}").exists():
        number += 1
    aside.mkdir()
    for name in _FILES_OF_A_RUN:
        if (directory / name).exists():
            (directory / name).rename(aside / name)
    return aside


def _flat(tree: dict[str, Any]) -> dict[str, Any]:
    """The values of a tree by "section.key"."""
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
