"""Where a step's time goes on one GPU: its longest kernels, what it waits for, and what Python does meanwhile.

`wall_ms` is that of steps that nothing watches. What Python does is the time in each function itself, by its own
profiler, which makes Python slower: it says where time goes, not how much.

- lora      a training step of Qwen3-4B, LoRA of rank 32, 4 sequences of 1,024 tokens
- hybrid    the same of Qwen3.5-4B
- mixed     32 sequences of 128 to 4,096 tokens
- full      Qwen3-1.7B, all weights, 8 sequences
- images    Qwen3-VL-4B, 8 new images
- experts   a step of 16 layers of Qwen3-30B-A3B, LoRA of rank 32, 8 sequences of 1,024; experts_tenants: eight models
- decode    a step of the sampler, Qwen3-1.7B, 64 requests, half of them with an adapter
- decode_hybrid  the same of Qwen3.5-4B, without an adapter; decode_rl: with 256 requests, all with an adapter
- decode_experts  the same of Qwen3-30B-A3B, 64 requests, half of them with an adapter
- alone     a step of the sampler, Qwen3-1.7B, with one request

    python -m benchmarks.gpu.profile --parts lora,decode
"""

import cProfile
import itertools
import pstats
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.measuring import DEVICE, Figures, begin, finish, isolated, release, say
from benchmarks.gpu.sampling import ALONE, EXPERTS, HYBRID, MANY, Load, Requests, adapter_of, sampler_of, stepped
from benchmarks.gpu.shapes import base_of, configuration, network_of
from benchmarks.gpu.training import (
    LENGTH,
    RANK,
    RANKS,
    backend_of,
    batch_of,
    datum,
    filled,
    mixed_lengths,
    rendered_images,
    text_datum,
    train,
)
from tinsmith.models.base import BaseModel

PARTS = (
    *("lora", "hybrid", "mixed", "full", "images", "experts", "experts_tenants"),
    *("decode", "decode_hybrid", "decode_rl", "decode_experts", "alone"),
)
LONGEST = 28
"""So many kernels, and so many functions, are listed."""
LONGEST_GAPS = 12
"""So many stretches in which the device does nothing are listed."""


def profiled(step: Callable[[], object], steps: int) -> Figures:
    """Milliseconds of each of that many steps; lists the kernels and the functions."""
    finish()
    began = time.perf_counter()
    _repeat(step, steps)
    wall_s = time.perf_counter() - began
    python = cProfile.Profile()
    python.runcall(_repeat, step, steps)
    _list_functions(python, steps)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if DEVICE == "cuda" else [])]
    with profile(activities=kinds) as profiler:
        _repeat(step, steps)
    kernels = [event for event in profiler.events() or () if str(event.device_type).endswith("CUDA")]
    by_name: dict[str, list[float]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel.time_range.elapsed_us())
    for name, times in sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:LONGEST]:
        say(ms=round(sum(times) / 1000 / steps, 3), calls=round(len(times) / steps, 1), kernel=name[:110])
    _list_gaps(kernels, [event for event in profiler.events() or () if str(event.device_type).endswith("CPU")])
    return {
        "wall_ms": 1000 * wall_s / steps,
        "busy_ms": _covered(kernels) / 1000 / steps,
        "kernels": len(kernels) / steps,
    }


def _repeat(step: Callable[[], object], steps: int) -> None:
    for _ in range(steps):
        step()
    finish()


def _list_functions(python: cProfile.Profile, steps: int) -> None:
    found: Any = pstats.Stats(python)
    by_time = sorted(found.stats.items(), key=lambda item: -item[1][2])
    for (file, line, name), (_, calls, own_s, _, _) in by_time[:LONGEST]:
        place = name if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {name}"
        say(python_ms=round(1000 * own_s / steps, 3), calls=round(calls / steps, 1), function=place[:110])


def _list_gaps(kernels: list[Any], operations: list[Any]) -> None:
    """The longest stretches between two kernels, and which operations of the host took most of each."""
    gaps: list[tuple[float, float, str, str]] = []
    end, before = 0.0, ""
    for kernel in sorted(kernels, key=lambda kernel: kernel.time_range.start):
        if before and kernel.time_range.start > end:
            gaps.append((end, kernel.time_range.start, before, kernel.name))
        if kernel.time_range.end > end:
            end, before = kernel.time_range.end, kernel.name
    say(gaps=len(gaps), gaps_ms=sum(stop - start for start, stop, _, _ in gaps) / 1000)
    for start, stop, before, after in sorted(gaps, key=lambda gap: gap[0] - gap[1])[:LONGEST_GAPS]:
        shares: dict[str, float] = {}
        for operation in operations:
            inside = min(stop, operation.time_range.end) - max(start, operation.time_range.start)
            if inside > 0:
                shares[operation.name] = shares.get(operation.name, 0.0) + inside
        most = sorted(shares.items(), key=lambda share: -share[1])[:6]
        host = ", ".join(f"{name[:36]} {share / 1000:.2f}" for name, share in most)
        say(gap_ms=round((stop - start) / 1000, 3), host_ms=host, behind=before[:50], until=after[:50])


def _covered(kernels: list[Any]) -> float:
    """Microseconds in which at least one kernel ran."""
    covered, end = 0.0, 0.0
    for start, stop in sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels):
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def training(shape: str, lengths: Sequence[int], *ranks: int) -> Figures:
    """Steps on text of a model of each rank, which get as many sequences each."""
    models = {f"m{number}": rank for number, rank in enumerate(ranks)}
    backend = backend_of(_base(shape), models)
    each = len(lengths) // len(ranks)
    work = [text_datum(f"m{number // each}", tokens) for number, tokens in enumerate(batch_of(lengths))]
    return _steps(lambda: train(backend, filled(work, backend.passes.tokens_per_pass), list(models)))


def images() -> Figures:
    """Steps on new images."""
    backend = backend_of(_base("VL-4B"), {"m": RANK})
    upcoming = itertools.cycle(
        [[datum("m", rendered) for rendered in those] for those in rendered_images(backend.base)[0]]
    )

    def step() -> None:
        backend.base.features.clear()
        train(backend, filled(next(upcoming), backend.passes.tokens_per_pass), ["m"])

    return _steps(step)


def _base(shape: str) -> BaseModel:
    config = configuration(shape)
    network = network_of(config)
    release()
    return base_of(config, network)


def _steps(step: Callable[[], None]) -> Figures:
    for _ in range(4):
        step()
    return profiled(step, 3)


def decoding(load: Load, shape: str = "1.7B") -> Figures:
    """Steps of the sampler in the middle of long answers."""
    base = _base(shape)
    sampler, requests = sampler_of(base), Requests()
    adapter = adapter_of(base)
    for row in range(load.rows):
        requests.add(sampler, load.prompt, 1000, adapter if row < load.with_adapter else None)
    for _ in range(load.prompt):
        stepped(sampler)
    return profiled(partial(stepped, sampler), 20)


def main() -> None:
    """Profile what was asked for."""
    asked = begin(__doc__, PARTS)
    actions: dict[str, Callable[[], Figures]] = {
        "lora": partial(training, "4B", [LENGTH] * 4, RANK),
        "hybrid": partial(training, "Qwen3.5-4B", [LENGTH] * 4, RANK),
        "mixed": partial(training, "4B", mixed_lengths(), RANK),
        "full": partial(training, "1.7B", [LENGTH] * 8, 0),
        "images": images,
        "experts": partial(training, "30B-A3B/16", [LENGTH] * 8, RANK),
        "experts_tenants": partial(training, "30B-A3B/16", [LENGTH] * 16, *RANKS),
        "decode": partial(decoding, MANY[0]),
        "decode_hybrid": partial(decoding, HYBRID[0], "Qwen3.5-4B"),
        "decode_rl": partial(decoding, Load("rl", 256, with_adapter=256), "Qwen3.5-4B"),
        "decode_experts": partial(decoding, EXPERTS[1], "30B-A3B"),
        "alone": partial(decoding, ALONE),
    }
    for part in asked.parts:
        isolated(part, actions[part], asked.budget)


if __name__ == "__main__":
    main()
