"""What copies of LoRA models cost on one GPU, and how soon work goes on when the worker is killed.

Published shapes with random weights in bfloat16, through `tinsmith serve` and the SDK; their files lie in memory.
Parts:

- cost     Qwen3-4B, LoRA of rank 32: steps of 4×1,024 tokens without copies and with the default's, on servers in turn
- death    the same model: seconds from a SIGKILL of the worker to the next finished step
- experts  as `death`, Qwen3.6-35B-A3B
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
from functools import partial
from pathlib import Path

import pytest
import tinker

from benchmarks.chaos import pid_of
from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, figure, isolated_series, release
from benchmarks.gpu.sampling import SHARED_MEMORY
from benchmarks.gpu.shapes import configuration, network_of, write_surroundings
from benchmarks.gpu.user_day import Day, step
from benchmarks.servers import API_KEY, random_datums
from tests.running import serving

BATCH = [32 if TINY else 1024] * 4
STEPS = 8 if TINY else 100
DEATHS = 2 if TINY else 3
MODELS = 6 if TINY else 200
SETTLE_S = 15.0
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


def cost() -> Cases:
    """Seconds of all steps together: a copy is made during some of them."""
    data, seconds = random_datums(BATCH), dict[str, list[float]](without=[], default=[])
    with folder_with("4B") as folder:
        for name, options in (("without", ("--kept-copies-gib", "0")), ("default", ())) * 2:
            with day_in(folder, *options) as day:
                model = day.model()
                for _ in range(3):
                    step(model, data)
                began = time.perf_counter()
                for _ in range(STEPS):
                    step(model, data)
                seconds[name].append((time.perf_counter() - began) / STEPS)
    without, default = (statistics.median(seconds[name]) for name in ("without", "default"))
    yield "", {"without_s": without, "default_s": default, "ratio": default / without}


def death(shape: str) -> Cases:
    """Kill the worker after ever more steps; the step behind it is sent at once."""
    data, seconds = random_datums(BATCH), list[float]()
    with folder_with(shape) as folder, day_in(folder) as day:
        model = day.model()
        for _ in range(DEATHS):
            time.sleep(SETTLE_S)
            for _ in range(STEPS // 4 + 1):
                step(model, data)
            began = time.perf_counter()
            os.kill(pid_of(day.server, "worker"), signal.SIGKILL)
            step(model, data)
            seconds.append(time.perf_counter() - began)
    yield "", {"median_s": statistics.median(seconds), "slowest_s": max(seconds)}


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


PARTS: dict[str, Callable[[], Cases]] = {
    "cost": cost,
    "death": partial(death, "4B"),
    "experts": partial(death, "35B-A3B"),
    "many": many,
}


def main() -> None:
    """Measure what was asked for."""
    asked = begin(__doc__, list(PARTS))
    found = {name: isolated_series(name, PARTS[name], asked.budget).get("", {}) for name in asked.parts}
    figure("copies_cost", found.get("cost", {}).get("ratio"), "at most 1.01")
    figure("death_4b_s", found.get("death", {}).get("slowest_s"), "at most 10")
    figure("death_35b_s", found.get("experts", {}).get("slowest_s"), "at most 30")


if __name__ == "__main__":
    main()
