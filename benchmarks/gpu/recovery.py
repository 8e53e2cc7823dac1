"""What copies of LoRA models cost on one GPU, and how soon work goes on when the worker is killed.

Published shapes with random weights in bfloat16, through `tinsmith serve` and the SDK; their files lie in memory.
Parts:

- dense    Qwen3-4B, LoRA of rank 32: steps of 4×1,024 tokens without copies and with the default's, and seconds from a
           SIGKILL of the worker to the next finished step
- experts  the second, Qwen3.6-35B-A3B
- many     Qwen3-4B: 200 models of rank 8, each stepped in turn on one sequence of 1,024 tokens

    python -m benchmarks.gpu.recovery --output benchmarks/results/recovery.txt
    TINY=1 python -m benchmarks.gpu.recovery
"""

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from tinker import types

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, figure, isolated_series, release
from benchmarks.gpu.sampling import SHARED_MEMORY
from benchmarks.gpu.shapes import configuration, network_of, write_surroundings
from benchmarks.gpu.user_day import Day, step
from benchmarks.servers import API_KEY, random_datums
from tests.running import serving

BATCH = [32 if TINY else 1024] * 4
STEPS = 8 if TINY else 100
DEATHS = 2
MODELS = 6 if TINY else 200
SETTLE_S = 10.0
"""Seconds before each death: another worker stands by then."""

Cases = Iterator[tuple[str, Figures]]


@contextmanager
def folder_with(shape: str) -> Iterator[Path]:
    """Write a model of this shape into memory, under `model`; what is compiled lies there too."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        config = configuration(shape)
        network = network_of(config)
        network.save_pretrained(write_surroundings(config, folder / "model"))
        del network
        release()
        patch.setenv("TRITON_CACHE_DIR", str(folder / "kernels"))
        yield folder


@contextmanager
def day_in(folder: Path, *options: str) -> Iterator[Day]:
    """Serve the model of a folder with these options."""
    model = ("--base-model", f"bench={folder / 'model'}", "--device", DEVICE, "--dtype", "bfloat16")
    with serving(folder, *model, *options) as server:
        server.wait_for_health()
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            yield Day(server, service)


def dense() -> Cases:
    """Steps without copies and with the default's, each against the median step of the same server; then deaths."""
    data, mean_s, excess = random_datums(BATCH), dict[str, float](), dict[str, float]()
    with folder_with("4B") as folder:
        for name, options in (("without", ("--kept-copies-gib", "0")), ("default", ())):
            with day_in(folder, *options) as day:
                model = day.model()
                times = [_seconds(model, data) for _ in range(STEPS + 3)][3:]
                mean_s[name] = statistics.mean(times)
                excess[name] = mean_s[name] / statistics.median(times)
                if name == "default":
                    yield "death", deaths(day, model)
    found = {"without_s": mean_s["without"], "default_s": mean_s["default"]}
    yield "cost", found | {"ratio": excess["default"] / excess["without"]}


def _seconds(model: tinker.TrainingClient, data: list[types.Datum]) -> float:
    began = time.perf_counter()
    step(model, data)
    return time.perf_counter() - began


def deaths(day: Day, model: tinker.TrainingClient) -> Figures:
    """Kill the worker after some steps, again and again; the step behind it is sent at once."""
    data, seconds = random_datums(BATCH), list[float]()
    for _ in range(DEATHS):
        time.sleep(SETTLE_S)
        for _ in range(STEPS // 4 + 1):
            step(model, data)
        os.kill(day.server.worker_pid(), signal.SIGKILL)
        seconds.append(_seconds(model, data))
    return {"median_s": statistics.median(seconds), "slowest_s": max(seconds)}


def experts() -> Cases:
    """Deaths of a worker that holds a mixture of experts."""
    with folder_with("35B-A3B") as folder, day_in(folder) as day:
        yield "death", deaths(day, day.model())


def many() -> Cases:
    """Two rounds over all models: every one is made, stepped, and found again."""
    data = random_datums(BATCH[:1])
    with folder_with("4B") as folder, day_in(folder) as day:
        began = time.perf_counter()
        models = [day.model(rank=8) for _ in range(MODELS)]
        made_s = (time.perf_counter() - began) / MODELS
        rounds = []
        for _ in range(2):
            began = time.perf_counter()
            for model in models:
                step(model, data)
            rounds.append((time.perf_counter() - began) / MODELS)
    yield "", {"models": MODELS, "made_s": made_s, "first_step_s": rounds[0], "step_s": rounds[1]}


PARTS: dict[str, Callable[[], Cases]] = {"dense": dense, "experts": experts, "many": many}


def main() -> None:
    """Measure what was asked for."""
    asked = begin(__doc__, list(PARTS))
    found = {name: isolated_series(name, PARTS[name], asked.budget) for name in asked.parts}
    figure("copies_cost", found.get("dense", {}).get("cost", {}).get("ratio"), "at most 1.01")
    figure("death_4b_s", found.get("dense", {}).get("death", {}).get("slowest_s"), "at most 10")
    figure("death_35b_s", found.get("experts", {}).get("death", {}).get("slowest_s"), "at most 30")


if __name__ == "__main__":
    main()
