"""Where metrics go: one small interface, and a class for each place.

The JSONL file is always written; a resumed run first removes the lines of the steps that it does again.
"""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rich.console import Console
from tensorboardX import SummaryWriter

from tinsmith.errors import ConfigError
from tinsmith.rl.metrics import Metrics

SHOWN = ("reward", "eval/reward", "response_tokens", "entropy", "kl_sampler_trainer", "zero_variance_groups", "seconds/step")
"""What the console has room for."""


class Tracker(Protocol):
    """Takes the metrics of a run, step by step."""

    def log(self, step: int, metrics: Metrics) -> None:
        """The metrics of a step."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class JsonlTracker:
    """One line of JSON for each step, in `file`. Lines of steps from `first_step` on are removed: these steps are done again.

    They are removed with the first new line and not before: a run that cannot go on, because its server is gone, leaves the file as it was.
    The evaluation before the first step is step -1.
    """

    def __init__(self, file: Path, first_step: int) -> None:
        self.file, self.first_step = file, first_step
        self._is_shortened = False
        file.touch()

    def log(self, step: int, metrics: Metrics) -> None:
        """Append a line."""
        if not self._is_shortened:
            self._shorten()
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")

    def close(self) -> None:
        """Every line is written already."""

    def _shorten(self) -> None:
        kept = [line for line in _lines(self.file) if json.loads(line)["step"] < self.first_step]
        new = self.file.with_name(f"{self.file.name}.new")  # so that a run that is killed now leaves the whole file
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(self.file)
        self._is_shortened = True


class ConsoleTracker:
    """One line for each step, with the numbers that one looks at."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def log(self, step: int, metrics: Metrics) -> None:
        """Print a line."""
        shown = "  ".join(f"{name} [bold]{metrics[name]:.3f}[/]" for name in SHOWN if name in metrics)
        self.console.print(f"step {step:4d}  {shown}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Nothing is held back."""


class TensorBoardTracker:
    """Scalars for TensorBoard, below `directory`."""

    def __init__(self, directory: Path) -> None:
        self.writer = SummaryWriter(str(directory))

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the scalars."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the file."""
        self.writer.close()


class ServiceTracker:
    """Weights & Biases or trackio, whose modules have the same `init`, `log` and `finish`.

    A resumed run begins another one there, in one group with its first part.
    """

    def __init__(self, module: ModuleType, project: str, name: str, settings: dict[str, Any]) -> None:
        self.module: Any = module
        self.module.init(project=project, name=name, group=name, config=settings)

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics, by the number of steps done: Weights & Biases drops what belongs to a step below zero."""
        self.module.log(metrics, step=step + 1)

    def close(self) -> None:
        """Wait until everything is sent."""
        self.module.finish()


def make_trackers(names: Sequence[str], directory: Path, first_step: int, settings: dict[str, Any], console: Console) -> list[Tracker]:
    """The trackers of a run: `metrics.jsonl`, and those that `names` lists.

    Raises ConfigError for a name that is not known, or whose package is not installed.
    """
    trackers: list[Tracker] = [JsonlTracker(directory / "metrics.jsonl", first_step)]
    for name in names:
        match name:
            case "console":
                trackers.append(ConsoleTracker(console))
            case "tensorboard":
                trackers.append(TensorBoardTracker(directory / "tensorboard"))
            case "wandb" | "trackio":
                trackers.append(ServiceTracker(_installed(name), "tinsmith-rl", directory.name, settings))
            case _:
                raise ConfigError(f"trackers: {name!r} is not known; known are console, tensorboard, wandb and trackio")
    return trackers


def _installed(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"trackers: {package!r} is not installed; install it with: pip install {package}") from error


def _lines(file: Path) -> list[str]:
    """The whole lines of a file. The last one is not whole if the process was killed while it wrote it."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n")]
