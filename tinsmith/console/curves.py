"""Curves of a whole run: the metrics of its operations, one point for each optimizer step.

A step's forward and backward passes may come in several parts: their metrics are joined as the end of their name says,
`:sum` by adding, `:mean` by the tokens of each part. Rows are added as they come, so a run is read once.
"""

import math
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tinsmith.console.charts import downsample, smoothed
from tinsmith.store.operations import MetricsRow
from tinsmith.store.records import COMPARED

FORWARD = "forward/"
"""Prefix of the metrics of passes without gradients."""
POINTS = 400
"""Most points of a curve that a page draws: one for each pixel of a small chart, about."""
FIRST = ("loss/token", "loss:sum", "grad_norm", "learning_rate", "tokens", "seconds")
"""Metrics of every run, in the order in which they are shown; others follow by name."""

MEANINGS = {
    "loss/token": (
        "loss:sum by tokens of the step, also those without weight. It falls while a model learns from examples; in "
        "reinforcement learning it says little, so look at rewards."
    ),
    "loss:sum": "The loss that was minimized, summed over all tokens. It grows with the batch, too.",
    "grad_norm": (
        "Length of the gradient before clipping. A spike is an unusual batch; steady growth often means that the "
        "learning rate is too high; 0 means that nothing had weight."
    ),
    "learning_rate": "Size of each update, as the client sent it with the step.",
    "tokens": "Tokens of the step's forward and backward passes.",
    "seconds": "From the step before to this one: passes, optimizer, queue, and what the client does in between.",
    "kl_sampler_trainer/k1": (
        "Mean of the sampler's log-probability minus the trainer's. Old samples, large steps and temperatures other "
        "than 1 move it away from 0."
    ),
    "kl_sampler_trainer/k3": (
        "The same divergence with less noise, never negative: mean of exp(d) - 1 - d, d the trainer's "
        "log-probability minus the sampler's. Above 0.01, look for the reason."
    ),
    "tinsmith_stable_reinforce/weight:mean": "Mean weight of the sampled tokens: 1 where sampler and trainer agree.",
    "tinsmith_stable_reinforce/limited:mean": (
        "Share of tokens whose weight a bound has cut. Above some percent, samples are too old, or steps too large."
    ),
    "tinsmith_stable_reinforce/drift:mean": "How far the trained policy has moved from the one that sampled.",
}
"""The meaning of a metric, in plain words."""


ROLLOUTS = "rl/"
"""Prefix of the metrics that `tinsmith rl` has written."""
OF_ROLLOUTS = {
    "reward": ("Reward", "mean of a batch; it should rise"),
    "eval/reward": ("Reward of evaluations", "on prompts that are not trained on"),
    "entropy": ("Entropy", "nats per token; near 0 the model tries nothing new"),
    "response_tokens": ("Tokens of an episode", "that the model sampled"),
    "kl_sampler_trainer": ("KL of sampler and trainer", "near 0 they compute the same"),
    "zero_variance_groups": ("Groups that teach nothing", "share whose rewards are all equal"),
    "staleness": ("Staleness", "steps between the weights that sampled and those that learn"),
}
"""Those of them that are drawn, with title and meaning."""


def meaning(name: str) -> str:
    """Say in plain words what a metric is."""
    if name in MEANINGS:
        return MEANINGS[name]
    if name.startswith(ROLLOUTS):
        title, told = OF_ROLLOUTS[name.removeprefix(ROLLOUTS)]
        return f"{title}: {told}. By step of tinsmith rl, which may have several optimizer steps."
    if name.startswith(FORWARD):
        return f"{name.removeprefix(FORWARD)} of passes without gradients, such as an evaluation on other data."
    how = {"sum": "Summed over the step.", "mean": "Mean over the datums of the step."}
    return how.get(name.rpartition(":")[2], "As the operation returned it.")


@dataclass
class _Joined:
    """Metrics of the parts of one step."""

    tokens: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, tokens: int, metrics: Mapping[str, float]) -> None:
        before, self.tokens = self.tokens, self.tokens + tokens
        for name, value in metrics.items():
            known = self.values.get(name)
            if known is None:
                self.values[name] = value
            elif name.endswith(":sum"):
                self.values[name] = known + value
            elif name.endswith(":max"):
                self.values[name] = max(known, value)
            elif name.endswith(":min"):
                self.values[name] = min(known, value)
            elif name.endswith(":mean") and self.tokens:
                self.values[name] = (known * before + value * tokens) / self.tokens
            else:
                self.values[name] = value

    def told(self) -> dict[str, float]:
        """Return the metrics, with means over the tokens that were compared with the sampler in place of their sums."""
        told = dict(self.values)
        count, *sums = (told.pop(f"{name}:sum", 0.0) for name in COMPARED)
        return told | ({name: each / count for name, each in zip(COMPARED[1:], sums, strict=True)} if count else {})


class Curves:
    """The curves of one run, as far as they were read. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read_to = 0
        """Number of the last row."""
        self.steps = 0
        self._series: dict[str, tuple[array[int], array[float]]] = {}
        """Steps and values by metric."""
        self._passes, self._forwards = _Joined(), _Joined()
        self._stepped_at: float | None = None

    @property
    def names(self) -> list[str]:
        """The metrics that there are, in the order in which they are shown."""
        return [*(name for name in FIRST if name in self._series), *sorted(self._series.keys() - set(FIRST))]

    @property
    def last(self) -> dict[str, float]:
        """The last value of each metric."""
        with self._lock:
            return {name: self._series[name][1][-1] for name in self.names}

    def add(self, rows: Iterable[MetricsRow]) -> None:
        """Add rows that follow those before."""
        for row in rows:
            metrics = {name: float(value) for name, value in orjson.loads(row.metrics).items()}
            with self._lock:
                self._add(row, metrics)

    def _add(self, row: MetricsRow, metrics: Mapping[str, float]) -> None:
        self.read_to = row.number
        if row.kind == "forward":
            self._forwards.add(row.tokens, metrics)
        elif row.kind == "forward_backward":
            self._passes.add(row.tokens, metrics)
        elif row.kind == "optim_step":
            self._end_step(row.at, metrics)

    def _end_step(self, at: float, metrics: Mapping[str, float]) -> None:
        self.steps += 1
        told = dict(metrics)
        passes, forwards = self._passes, self._forwards
        if passes.values:
            told |= passes.told() | {"tokens": passes.tokens}
            if passes.tokens and "loss:sum" in passes.values:
                told["loss/token"] = passes.values["loss:sum"] / passes.tokens
        told |= {f"{FORWARD}{name}": value for name, value in forwards.told().items()}
        if self._stepped_at is not None:
            told["seconds"] = at - self._stepped_at
        self._stepped_at = at
        for name, value in told.items():
            steps, values = self._series.setdefault(name, (array("L"), array("d")))
            steps.append(self.steps)
            values.append(value)
        self._passes, self._forwards = _Joined(), _Joined()

    def drawn(self, smoothing: float, most: int = POINTS) -> dict[str, dict[str, list[Any]]]:
        """Return about `most` points of each curve: `x`, `y`, and with smoothing the `smooth` value at each.

        Takes half a second for 100,000 steps: not for an event loop.
        """
        with self._lock:
            series = {name: (steps[:], values[:]) for name in self.names for steps, values in [self._series[name]]}
        return {name: drawn(steps, values, smoothing, most) for name, (steps, values) in series.items()}


def drawn(steps: Sequence[int], values: Sequence[float], smoothing: float, most: int = POINTS) -> dict[str, list[Any]]:
    """Return about `most` points of a curve, as `Curves.drawn` does of all."""
    at = downsample(steps, values, most)
    found: dict[str, list[Any]] = {"x": [steps[each] for each in at], "y": [_finite(values[each]) for each in at]}
    if smoothing:
        average = smoothed(values, smoothing)
        found["smooth"] = [_rounded(average[each]) for each in at]
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
