"""All metrics, declared once: each lives in the process that counts it, and the server tells those of all.

    worker --numbers--> engine --numbers--> server --text--> Prometheus, `tinsmith status`

A process has one registry, whose metrics are changed where the thing happens. Its numbers travel once a second
(`protocol/reports.py`). Labels have few values: base models, kinds, reasons; what is labelled with a model disappears
with it. Counters begin at zero with their process, which Prometheus's `rate` allows for.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinsmith.observing.spans import DEVICE, SPANS, Activities

SERVER, ENGINE, WORKER = (CollectorRegistry() for _ in range(3))
"""Metrics that each kind of process counts."""

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""Bounds of the durations of operations."""

# ---- Counted by the server

REFUSALS = Counter(
    "tinsmith_refusals", "Requests that were answered with an error.", ["reason", "status"], registry=SERVER
)
ENGINE_RESTARTS = Counter("tinsmith_engine_restarts", "Engines that ended unexpectedly.", registry=SERVER)
ENGINE_READY = Gauge("tinsmith_engine_ready", "Whether the engine can take work.", registry=SERVER)
POLLS = Gauge("tinsmith_polls_waiting", "Long polls that wait for a result.", registry=SERVER)
PENDING_SAMPLES = Gauge("tinsmith_pending_samples", "Sequences of sample requests not finished.", registry=SERVER)
PENDING_SAMPLE_AGE = Gauge(
    "tinsmith_pending_sample_age_seconds", "Age of the oldest sample request that is not finished.", registry=SERVER
)
QUEUED_BYTES = Gauge("tinsmith_queued_bytes", "Size of all queued training operations.", registry=SERVER)

# ---- Counted by the engine

OPERATIONS = Counter(
    "tinsmith_operations",
    "Training operations that have ended: ok, user or server.",
    ["kind", "outcome"],
    registry=ENGINE,
)
OPERATION_SECONDS = Histogram(
    "tinsmith_operation_seconds",
    "Duration of finished training operations by stage: queued until it begins, run until its result is there.",
    ["kind", "stage"],
    buckets=SECONDS,
    registry=ENGINE,
)
QUEUED = Gauge(
    "tinsmith_queued_operations",
    "Training operations that the engine knows and that have not ended.",
    ["kind", "tenant"],
    registry=ENGINE,
)
QUEUE_AGE = Gauge(
    "tinsmith_queued_operation_age_seconds",
    "Age of the oldest of these operations.",
    ["kind", "tenant"],
    registry=ENGINE,
)
TRAINED_TOKENS = Counter("tinsmith_trained_tokens", "Tokens trained on.", ["base_model"], registry=ENGINE)
PASSES = Counter("tinsmith_passes", "Passes given to the workers.", ["base_model", "direction"], registry=ENGINE)
PASS_TOKENS = Counter("tinsmith_pass_tokens", "Tokens of these passes.", ["base_model", "direction"], registry=ENGINE)
PASS_ROOM = Counter(
    "tinsmith_pass_room_tokens",
    "Tokens that these passes could have held.",
    ["base_model", "direction"],
    registry=ENGINE,
)
PASS_SECONDS = Counter(
    "tinsmith_pass_device_seconds",
    "Seconds that devices needed for passes.",
    ["base_model", "direction"],
    registry=ENGINE,
)
WORKER_RESTARTS = Counter("tinsmith_worker_restarts", "Times that the workers ended unexpectedly.", registry=ENGINE)
MODELS_RECOVERED = Counter("tinsmith_models_recovered", "Models restored on new workers.", registry=ENGINE)
MODELS_LOST = Counter("tinsmith_models_lost", "Models that could not be restored.", registry=ENGINE)

# ---- Counted by a worker

SAMPLED_TOKENS = Counter("tinsmith_sampled_tokens", "Tokens of finished samples.", ["base_model"], registry=WORKER)
MODEL_SAMPLED_TOKENS = Counter(
    "tinsmith_model_sampled_tokens", "Tokens sampled from snapshots of each loaded model.", ["model"], registry=WORKER
)
SAMPLES = Counter(
    "tinsmith_samples",
    "Sample requests that have ended: ok, user or server.",
    ["base_model", "outcome"],
    registry=WORKER,
)
PROMPT_TOKENS = Counter(
    "tinsmith_prompt_tokens",
    "Prompt tokens of finished samples: cached ones were found in the prefix cache.",
    ["base_model", "cached"],
    registry=WORKER,
)
SEQUENCES = Gauge(
    "tinsmith_sampler_sequences", "Sequences that run and that wait.", ["base_model", "state"], registry=WORKER
)
PLACES = Gauge("tinsmith_sampler_places", "Most sequences that run at once.", ["base_model"], registry=WORKER)
PUBLISHES = Counter(
    "tinsmith_publishes", "Snapshots of weights published for sampling.", ["base_model"], registry=WORKER
)
MEMORY = Gauge("tinsmith_worker_memory_bytes", "Memory that the process holds.", ["place"], registry=WORKER)
GRAPHS = Gauge("tinsmith_graphs", "Kernels compiled and graphs captured since the start.", ["kind"], registry=WORKER)
PAGING = Gauge(
    "tinsmith_paging", "LoRA models on the device and in host memory, and their moves.", ["fact"], registry=WORKER
)
GPU_MEMORY = Gauge("tinsmith_gpu_memory_used_bytes", "Memory of the GPU in use by anybody.", ["gpu"], registry=WORKER)
GPU_SIZE = Gauge("tinsmith_gpu_memory_bytes", "Memory of the GPU.", ["gpu"], registry=WORKER)
GPU_UTILIZATION = Gauge(
    "tinsmith_gpu_utilization_ratio", "Share of the last second in which the GPU computed.", ["gpu"], registry=WORKER
)
GPU_TEMPERATURE = Gauge("tinsmith_gpu_temperature_celsius", "Temperature of the GPU.", ["gpu"], registry=WORKER)
GPU_POWER = Gauge("tinsmith_gpu_power_watts", "Power that the GPU draws.", ["gpu"], registry=WORKER)


class WorkerTime(Collector):
    """Seconds of the thread that owns the device, by what it did or waited for: they add up to all of its time.

    Only that thread changes the activity; any may collect. A GPU computes behind the thread, by a pass at most.
    """

    def __init__(self) -> None:
        self.activity = "starting"
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._spans = Activities(SPANS, DEVICE)
        self._lock = threading.Lock()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The body is this activity, but for what it interrupts itself with."""
        before = self.activity
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, activity: str) -> None:
        """Go over to another activity, which lasts until the next."""
        with self._lock:
            self._go_over(activity)

    def _go_over(self, activity: str) -> None:
        now = time.monotonic()
        passed_s, until = now - self._since, time.time()
        self._seconds[self.activity] = self._seconds.get(self.activity, 0.0) + passed_s
        self._spans.ended(self.activity, until - passed_s, until)
        self.activity, self._since = activity, now

    def flush(self) -> None:
        """Let the spans go as far as now, those of the activity that lasts included."""
        with self._lock:
            self._go_over(self.activity)
            self._spans.flush()

    def collect(self) -> Iterable[Metric]:
        """Return the seconds so far, those of the activity that lasts included."""
        with self._lock:
            seconds = {**self._seconds}
            seconds[self.activity] = seconds.get(self.activity, 0.0) + time.monotonic() - self._since
        family = CounterMetricFamily(
            "tinsmith_worker_activity_seconds", "Seconds of a worker by what it did or waited for.", labels=["activity"]
        )
        for activity, so_far in seconds.items():
            family.add_metric([activity], so_far)
        return [family]


WORKER_TIME = WorkerTime()
WORKER.register(WORKER_TIME)

# ---- Told by the engine's status

_OF_STATUS = (
    CounterMetricFamily("tinsmith_model_trained_tokens", "Tokens that each loaded model has trained on."),
    GaugeMetricFamily("tinsmith_model_queued_operations", "Unfinished operations of each loaded model."),
    CounterMetricFamily("tinsmith_worker_pass_tokens", "Tokens of passes given to each worker."),
    GaugeMetricFamily("tinsmith_worker_ready", "Whether each worker can take work."),
    GaugeMetricFamily("tinsmith_build_info", "Version of the server."),
)


def direction_of(backward: bool) -> str:
    """Return the label of a pass's direction, by which its activity is named too."""
    return "backward" if backward else "forward"


# ---- Their way from one process to the next, and to a reader

Number = tuple[str, dict[str, str], float]
"""A number with its name and labels, as Prometheus reads it."""

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",)}


def numbers(registry: CollectorRegistry) -> list[Number]:
    """Return all numbers that this process counts."""
    samples = (each for family in registry.collect() for each in family.samples)
    return [(each.name, each.labels, each.value) for each in samples if not each.name.endswith("_created")]


def metrics() -> dict[str, Metric]:
    """Return every metric without its numbers, by the names that its numbers have."""
    declared = [family for registry in (SERVER, ENGINE, WORKER) for family in registry.collect()]
    return {
        f"{each.name}{suffix}": Metric(each.name, each.documentation, each.type)
        for each in (*declared, *_OF_STATUS)
        for suffix in _SUFFIXES[each.type]
    }


def exposition(told: Iterable[Number]) -> bytes:
    """Write numbers of several processes in the text format of Prometheus."""
    known = metrics()
    families: dict[str, Metric] = {}
    for name, labels, value in told:
        family = families.setdefault(known[name].name, known[name])
        family.add_sample(name, labels, value)
    return generate_latest(_Families(families.values()))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = families

    def collect(self) -> Iterable[Metric]:
        return self.families
