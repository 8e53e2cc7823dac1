"""The numbers of all processes: for the status route, with rates over the last minute, and for Prometheus."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from tinsmith import __version__
from tinsmith.observing.metrics import SERVER, Number, exposition, numbers
from tinsmith.protocol.serving import Status

WINDOW_S = 60.0
"""Rates are averages over so many seconds."""

TRAINED, SAMPLED = "tinsmith_trained_tokens_total", "tinsmith_sampled_tokens_total"
WORKER_ACTIVITY = "tinsmith_worker_activity_seconds_total"
OF_MODEL = "tinsmith_model_sampled_tokens_total"
_SENSORS = {
    "tinsmith_gpu_memory_used_bytes": "memory_used",
    "tinsmith_gpu_memory_bytes": "memory",
    "tinsmith_gpu_utilization_ratio": "utilization",
    "tinsmith_gpu_temperature_celsius": "temperature",
    "tinsmith_gpu_power_watts": "power",
}

Grown = defaultdict[tuple[str, str], float]
"""How far counters have grown, by name and activity."""

_NOTHING = Status([], [], [])


class Activity:
    """The reports of one engine after the other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = _NOTHING
        self._counts: dict[tuple[str, str, int | None, str], float] = {}
        """Last value of each counter that there are rates of, by name, worker, its pid, and base model or activity."""
        self._grown: Grown = defaultdict(float)
        """Over all lives of their processes."""
        self._history: deque[tuple[float, Grown]] = deque()
        """Monotonic time, and what had grown until then. Only the first entry is older than the window."""

    def take(self, status: Status) -> None:
        """Take in a report."""
        now = self._clock()
        if not self._history:
            self._history.append((now - WINDOW_S, defaultdict(float)))  # a server starts at zero
        self._last = status
        before, self._counts = self._counts, {}
        pids = {str(rank): worker["pid"] for rank, worker in enumerate(status.workers)}
        for name, labels, value in status.numbers:
            if name in (TRAINED, SAMPLED, WORKER_ACTIVITY):
                activity = labels.get("activity", "")
                worker = labels.get("worker", "")
                key = name, worker, pids.get(worker), labels.get("base_model", activity)
                self._grown[name, activity] += value - before.get(key, 0.0)
                self._counts[key] = value
        self._history.append((now, self._grown.copy()))
        self._forget_before(now - WINDOW_S)

    def clear(self) -> None:
        """Forget what an engine does that has ended: the next one counts from zero."""
        self._last = _NOTHING
        self._counts.clear()

    @property
    def tokens(self) -> dict[str, float]:
        """Tokens trained and sampled since the server started."""
        return {"training": self._grown[TRAINED, ""], "sampling": self._grown[SAMPLED, ""]}

    def gpus(self) -> list[dict[str, Any]]:
        """What the sensors of each worker's GPU say; without a driver there is none."""
        found: dict[str, dict[str, Any]] = {}
        for name, labels, value in self._last.numbers:
            if name in _SENSORS:
                worker = labels.get("worker", "0")
                found.setdefault(worker, {"worker": int(worker), "gpu": labels["gpu"]})[_SENSORS[name]] = value
        return [found[worker] for worker in sorted(found, key=int)]

    def describe(self) -> dict[str, Any]:
        """The reply of the status route."""
        grown, status = self._grown_of_window(), self._last
        seconds = {activity: value for (name, activity), value in grown.items() if name == WORKER_ACTIVITY}
        return {
            "models": status.models,
            "workers": status.workers,
            "samples": {"running": 0, "waiting": 0} | self._sums("tinsmith_sampler_sequences", "state"),
            "tokens_per_second": {
                "training": grown[TRAINED, ""] / WINDOW_S,
                "sampling": grown[SAMPLED, ""] / WINDOW_S,
            },
            "worker_time": {
                each: value / sum(seconds.values()) for each, value in sorted(seconds.items()) if value > 0
            },
            "memory_bytes": self._sums("tinsmith_worker_memory_bytes", "place"),
            "graphs": self._sums("tinsmith_graphs", "kind"),
            "paging": self._sums("tinsmith_paging", "fact"),
        }

    def text(self) -> bytes:
        """Everything that is known, for Prometheus. Models and workers that are gone have no numbers any more."""
        loaded = {model["model_id"] for model in self._last.models}
        told = [*numbers(SERVER), ("tinsmith_build_info", {"version": __version__}, 1.0), *_of_status(self._last)]
        told += [each for each in self._last.numbers if each[0] != OF_MODEL or each[1]["model"] in loaded]
        return exposition(told)

    def _sums(self, name: str, label: str) -> dict[str, int]:
        """Return the numbers of this name, summed up over all workers, by a label."""
        sums = Counter[str]()
        for each, labels, value in self._last.numbers:
            if each == name:
                sums[labels[label]] += int(value)
        return dict(sums)

    def _grown_of_window(self) -> Grown:
        self._forget_before(self._clock() - WINDOW_S)
        first = self._history[0][1] if self._history else {}
        return defaultdict(float, {key: value - first.get(key, 0.0) for key, value in self._grown.items()})

    def _forget_before(self, start: float) -> None:
        while len(self._history) > 1 and self._history[1][0] <= start:
            self._history.popleft()


def _of_status(status: Status) -> list[Number]:
    """The numbers of models and workers, which the status route tells too."""

    def labels(model: Mapping[str, Any]) -> dict[str, str]:
        return {"model": model["model_id"], "base_model": model["base_model"]}

    told: list[Number] = [
        ("tinsmith_model_trained_tokens_total", labels(each), each["trained_tokens"]) for each in status.models
    ]
    told += [("tinsmith_model_queued_operations", labels(each), each["queued"]) for each in status.models]
    for rank, each in enumerate(status.workers):
        worker = {"worker": str(rank)}
        told.append(("tinsmith_worker_pass_tokens_total", worker, each["pass_tokens"]))
        told.append(("tinsmith_worker_ready", worker | {"device": each["device"]}, float(each["state"] == "ready")))
    return told
