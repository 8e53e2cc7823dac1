"""Where the time of a step goes on one GPU: how long the device is busy, how many kernels run, and the longest ones.

- lora      a training step of Qwen3-4B, LoRA of rank 32, 4 sequences of 1,024 tokens
- hybrid    the same of Qwen3.5-4B
- full      Qwen3-1.7B, all weights, 8 sequences
- pictures  Qwen3-VL-4B, 8 new pictures
- decode    a step of the sampler, Qwen3-1.7B, 64 requests, half of them with an adapter
- alone     the same with one request

    python -m benchmarks.gpu.profile --parts lora,decode
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.measuring import DEVICE, Figures, begin, finish, isolated, release, say
from benchmarks.gpu.sampling import ALONE, MANY, Load, Requests, adapter_of, sampler_of, stepped
from benchmarks.gpu.shapes import base_of, configuration, network_of
from benchmarks.gpu.training import LENGTH, RANK, backend_of, batch_of, datum, filled, rendered_pictures, text_datum, train
from tinsmith.models.base import BaseModel

PARTS = ("lora", "hybrid", "full", "pictures", "decode", "alone")
LONGEST = 28
"""So many kernels are listed."""


@contextmanager
def profiled(steps: int) -> Iterator[Figures]:
    """Around that many steps: fills in milliseconds of each, and lists the kernels."""
    found: Figures = {}
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    finish()
    began = time.perf_counter()
    with profile(activities=kinds) as profiler:
        yield found
        finish()
        wall_s = time.perf_counter() - began
    kernels = [event for event in profiler.events() or () if str(event.device_type).endswith("CUDA")]
    found |= {"wall_ms": 1000 * wall_s / steps, "busy_ms": _covered(kernels) / 1000 / steps, "kernels": len(kernels) / steps}
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.time_range.elapsed_us())
    for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:LONGEST]:
        say(ms=round(sum(times) / 1000 / steps, 3), calls=round(len(times) / steps, 1), kernel=name[:110])


def _covered(kernels: list[Any]) -> float:
    """Microseconds in which at least one kernel ran."""
    covered, end = 0.0, 0.0
    for start, stop in sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def training(shape: str, count: int, rank: int) -> Figures:
    """Steps on text."""
    backend = backend_of(_base(shape), {"m": rank})
    work = [text_datum("m", tokens) for tokens in batch_of([LENGTH] * count)]
    return _steps(lambda: train(backend, filled(work, backend.tokens_per_pass), ["m"]))


def pictures() -> Figures:
    """Steps on new pictures."""
    backend = backend_of(_base("VL-4B"), {"m": RANK})
    upcoming = itertools.cycle([[datum("m", rendered) for rendered in those] for those in rendered_pictures(backend.base)[0]])

    def step() -> None:
        backend.base.features.clear()
        train(backend, filled(next(upcoming), backend.tokens_per_pass), ["m"])

    return _steps(step)


def _base(shape: str) -> BaseModel:
    config = configuration(shape)
    network = network_of(config)
    release()
    return base_of(config, network)


def _steps(step: Callable[[], None]) -> Figures:
    for _ in range(4):
        step()
    with profiled(3) as found:
        for _ in range(3):
            step()
    return found


def decoding(load: Load) -> Figures:
    """Steps of the sampler in the middle of long answers."""
    base = _base("1.7B")
    sampler, requests = sampler_of(base), Requests()
    adapter = adapter_of(base)
    for row in range(load.rows):
        requests.add(sampler, load.prompt, 1000, adapter if row < load.with_adapter else None)
    for _ in range(load.prompt):
        stepped(sampler)
    with profiled(20) as found:
        for _ in range(20):
            stepped(sampler)
    return found


def main() -> None:
    """Profile what was asked for."""
    asked = begin(__doc__, PARTS)
    actions: dict[str, Callable[[], Figures]] = {
        "lora": partial(training, "4B", 4, RANK),
        "hybrid": partial(training, "Qwen3.5-4B", 4, RANK),
        "full": partial(training, "1.7B", 8, 0),
        "pictures": pictures,
        "decode": partial(decoding, MANY[0]),
        "alone": partial(decoding, ALONE),
    }
    for part in asked.parts:
        isolated(part, actions[part], asked.budget)


if __name__ == "__main__":
    main()
