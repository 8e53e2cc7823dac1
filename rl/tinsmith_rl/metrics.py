"""Measures a batch of trajectories, and logs the numbers.

Names mean the same in training and in evaluation. Every tracker implements one small interface; `metrics.jsonl` is
always written.
"""

import json
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tensorboardX import SummaryWriter

from tinsmith_rl.config import RlConfig
from tinsmith_rl.datums import has_variance
from tinsmith_rl.errors import ConfigError, config_error
from tinsmith_rl.groups import Group, Replaced
from tinsmith_rl.trajectory import STOP_REASONS, Trajectory

log = logging.getLogger(__name__)

Metrics = dict[str, float]

PATIENCE = 5
"""Batches in a row from which nothing could be learnt until a warning says so."""

SHOWN = (
    "reward",
    "eval/reward",
    "response_tokens",
    "entropy",
    "kl_sampler_trainer",
    "zero_variance_groups",
    "seconds/step",
)
"""The metrics on the console."""


def trajectory_metrics(groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Rewards, lengths, stop reasons, the sampler's entropy, and the environment's own metrics under `env/`.

    Means are over usable trajectories, shares of stop reasons over all. The entropy, in nats, is estimated as the mean
    of -logprob over the sampled tokens.
    """
    everyone = [trajectory for group in groups for trajectory in group]
    usable = [trajectory for trajectory in everyone if trajectory.usable]
    rewards = [[trajectory.reward for trajectory in group if trajectory.usable] for group in groups]
    samples = [sample for trajectory in usable for sample in trajectory.samples]
    sampled = [sample.logprobs[sample.loss_mask] for sample in samples]
    logprobs = np.concatenate([np.zeros(0, dtype=np.float32), *sampled])  # [tokens]
    stop_reasons = Counter(trajectory.stop_reason for trajectory in everyone)
    return {
        **_reward([trajectory.reward for trajectory in usable]),
        "trajectories": float(len(everyone)),
        "dropped": float(len(everyone) - len(usable)),
        "turns": _mean([trajectory.turns for trajectory in usable]),
        "response_tokens": _mean([trajectory.sampled_tokens for trajectory in usable]),
        "samples_per_trajectory": _mean([len(trajectory.samples) for trajectory in usable]),
        "truncated": _mean([trajectory.truncated for trajectory in everyone]),
        "entropy": float(-logprobs.mean()) if len(logprobs) else 0.0,
        "zero_variance_groups": _mean([not has_variance(group) for group in rewards]),
        "tokens/sampled": float(len(logprobs)),
        "tokens/sequence": float(sum(len(sample.sequence) for sample in samples)),
        **{f"stop/{reason}": stop_reasons[reason] / max(len(everyone), 1) for reason in STOP_REASONS},
        **_env_metrics([trajectory.metrics for trajectory in usable]),
        **_seconds(everyone),
    }


def batch_metrics(groups: Sequence[Group], step: int, replaced: Mapping[Replaced, int]) -> Metrics:
    """The metrics of a batch at `step`: of its trajectories, its groups' ages, and groups replaced, by reason."""
    ages = [step - group.version for group in groups]
    return trajectory_metrics([group.trajectories for group in groups]) | {
        "staleness": sum(ages) / len(ages),
        "staleness_max": float(max(ages)),
        "groups_without_variance_replaced": float(replaced["without_variance"]),
        "groups_stale_replaced": float(replaced["stale"]),
    }


def _reward(rewards: Sequence[float]) -> Metrics:
    """Nothing if no trajectory is usable, because 0.0 would look like a reward."""
    return {"reward": _mean(rewards), "reward_std": float(np.std(rewards))} if rewards else {}


def succeeded(reward: float, wanted: float) -> bool:
    """Whether an episode is a success.

    Rounding is forgiven, because the rewards of several turns may not add up exactly.
    """
    return reward > wanted or math.isclose(reward, wanted, rel_tol=1e-9, abs_tol=1e-9)


def pass_at_k(successes: Sequence[Sequence[bool]], k: int) -> float:
    """The probability that at least one of k attempts succeeds, as a mean over prompts.

    Unbiased, from n >= k attempts with c successes: 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).
    """
    counts = [(len(attempts), sum(attempts)) for attempts in successes]
    return _mean([1.0 if n - c < k else 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1))) for n, c in counts])


def _env_metrics(reports: Sequence[Mapping[str, float]]) -> Metrics:
    names = sorted({name for report in reports for name in report})
    return {f"env/{name}": _mean([report[name] for report in reports if name in report]) for name in names}


def _seconds(trajectories: Sequence[Trajectory]) -> Metrics:
    """Mean seconds of a trajectory in each stage."""
    stages = sorted({stage for trajectory in trajectories for stage in trajectory.seconds})
    return {
        f"seconds/{stage}_of_a_trajectory": _mean([t.seconds.get(stage, 0.0) for t in trajectories]) for stage in stages
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


class BatchWatch:
    """Notices that a run learns nothing, because no rewards differ or every episode is cut, and says so once."""

    def __init__(self, config: RlConfig) -> None:
        self.config = config
        self.patience = min(PATIENCE, config.training.steps)
        self._in_a_row: Counter[str] = Counter()

    def look(self, groups: Sequence[Group]) -> None:
        """Count batches, and log a warning when enough of them in a row had the same fault."""
        rewards = [[trajectory.reward for trajectory in group.usable] for group in groups]
        if self.config.training.advantages == "batch":
            rewards = [list(chain(*rewards))]
        everyone = [trajectory for group in groups for trajectory in group.trajectories]
        self._count("equal", not any(map(has_variance, rewards)), self._why_equal(list(chain(*rewards))))
        self._count("cut", all(trajectory.truncated for trajectory in everyone), self._why_cut(everyone))

    def _count(self, fault: str, found: bool, message: str) -> None:
        self._in_a_row[fault] = self._in_a_row[fault] + 1 if found else 0
        if self._in_a_row[fault] == self.patience:
            log.warning("in %d batches %s", self.patience, message)

    def _why_equal(self, rewards: list[float]) -> str:
        if self.config.generation.temperature == 0:
            return (
                "nothing was learnt: generation: temperature=0 gives all episodes of a group the same answers; take 1"
            )
        same = bool(rewards) and not has_variance(rewards)
        what = f"every reward was {rewards[0]:g}" if same else "in each group all rewards were equal"
        what = what if rewards else "no episode gave a reward"
        return (
            f"{what}, and nothing was learnt. Let the model begin with some reward: warm it up (warmup: "
            "steps, for environments that can demonstrate), make the task easier or harder, "
            "reward parts of an answer, or play more episodes of each prompt (training: group_size)"
        )

    def _why_cut(self, everyone: Sequence[Trajectory]) -> str:
        limit = "max_tokens" if any(trajectory.stop_reason == "length" for trajectory in everyone) else "max_context"
        learnt = ", and nothing was learnt" if self.config.training.overlong_filtering else ""
        return (
            f"every episode was cut{learnt}; raise generation: {limit}={getattr(self.config.generation, limit)}, "
            "or ask for shorter answers"
        )


class Tracker(ABC):
    """Logs the metrics of a run, step by step. Steps count from 1; the evaluation before the first is step 0."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step. One that was logged before is done again, and so are those behind it."""

    def close(self) -> None:
        """Finish writing."""
        return


class JsonlTracker(Tracker):
    """Writes a line of JSON for each step to `file`, at once.

    A resumed run repeats steps. Their old lines are removed when the first new line is written, not before: a run that
    cannot continue, because its server is gone for example, leaves the file as it was.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._last: int | None = None
        """The last step in the file; None if that is not known yet."""
        file.touch()

    def log(self, step: int, metrics: Metrics) -> None:
        if self._last is None or step <= self._last:
            self._remove_lines_from(step)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._last = step

    def _remove_lines_from(self, step: int) -> None:
        kept = [line for line in _lines(self.file) if json.loads(line)["step"] < step]
        # Renamed, so that a run that is killed now leaves the whole file
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text("".join(kept), encoding="utf-8")
        new.replace(self.file)


class ConsoleTracker(Tracker):
    """Prints a line for each step, with the metrics of `SHOWN`."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def log(self, step: int, metrics: Metrics) -> None:
        shown = "  ".join(f"{name} [bold]{metrics[name]:.3f}[/]" for name in SHOWN if name in metrics)
        left = f"  left {timedelta(seconds=round(metrics['seconds/left']))}" if metrics.get("seconds/left") else ""
        self.console.print(f"step {step:4d}  {shown}{left}", highlight=False, soft_wrap=True)


class TensorBoardTracker(Tracker):
    """Writes scalars for TensorBoard to `directory`."""

    def __init__(self, directory: Path) -> None:
        self.writer = SummaryWriter(str(directory))

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class ServiceTracker(Tracker):
    """Sends metrics to Weights & Biases or trackio, whose modules have the same `init`, `log` and `finish`.

    A resumed run is another run there, in the same group as its first part.
    """

    def __init__(self, package: str, project: str, name: str, settings: dict[str, Any]) -> None:
        with config_error(
            f"trackers: {package!r} is not installed", ImportError, remedy=f"install it with: pip install {package}"
        ):
            self.module: Any = import_module(package)
        self.module.init(project=project, name=name, group=name, config=settings)

    def log(self, step: int, metrics: Metrics) -> None:
        self.module.log(metrics, step=step)

    def close(self) -> None:
        self.module.finish()


def make_trackers(names: Sequence[str], directory: Path, settings: dict[str, Any], console: Console) -> list[Tracker]:
    """The trackers of a run: `metrics.jsonl`, and those in `names`.

    Raises ConfigError for an unknown name, or one whose package is not installed.
    """
    trackers: list[Tracker] = [JsonlTracker(directory / "metrics.jsonl")]
    for name in names:
        match name:
            case "console":
                trackers.append(ConsoleTracker(console))
            case "tensorboard":
                trackers.append(TensorBoardTracker(directory / "tensorboard"))
            case "wandb" | "trackio":
                trackers.append(ServiceTracker(name, "tinsmith-rl", directory.name, settings))
            case _:
                raise ConfigError(f"trackers: {name!r} is not known; known are console, tensorboard, wandb and trackio")
    return trackers


def _lines(file: Path) -> list[str]:
    """The complete lines of a file. The last line is incomplete if the process was killed while it wrote it."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [line for line in lines if line.endswith("\n")]
