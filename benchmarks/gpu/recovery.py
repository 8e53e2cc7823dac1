"""What copies of LoRA models cost on one GPU, and how soon work goes on when worker, engine or server are killed.

Published shapes with random weights in bfloat16, through `tinsmith serve` and the SDK; their files lie in memory.
Parts:

- dense    Qwen3-4B, LoRA of rank 32: seconds from a SIGKILL to the next finished step of 4×1,024 tokens; a server is
           started again at once, as a supervisor does. And what a copy costs: steps are compared by how many came since
           the last copy, the sum of what the median of each of the first ones takes longer than that of the later ones,
           against the 5 s between copies by default.
- experts  the first for a mixture of experts, Qwen3.6-35B-A3B, of which a host of 128 GiB can hold files and weights
           of half the layers while they are loaded
- many     Qwen3-4B: 200 models of rank 8, each stepped in turn on one sequence of 1,024 tokens

    python -m benchmarks.gpu.recovery --output benchmarks/results/recovery.txt
    TINY=1 python -m benchmarks.gpu.recovery
"""

import os
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import tinker

from benchmarks.gpu.measuring import DEVICE, TINY, Figures, begin, figure, isolated_series, release
from benchmarks.gpu.sampling import SHARED_MEMORY
from benchmarks.gpu.shapes import configuration, network_of, write_surroundings
from benchmarks.gpu.user_day import Day, step
from benchmarks.servers import API_KEY, random_datums
from benchmarks.timing import seconds
from tests.running import serving
from tinsmith.config import TrainingConfig
from tinsmith.store.files import kept_copies

BATCH = [32 if TINY else 1024] * 4
STEPS = 8 if TINY else 15
DEATHS = 2
MODELS = 6 if TINY else 200
COPY_STEPS, COPIES_AFTER_S, LATE = (60, 0.2, 2) if TINY else (200, 2.4, 9)
"""Steps, seconds of work before each copy, and the number of steps behind it of which none pays for it any more."""
SETTLE_S = 10.0
"""Seconds before each death: a fork server stands by then."""
VICTIMS = ("worker", "engine", "server")

Cases = Iterator[tuple[str, Figures]]


@contextmanager
def folder_with(shape: str, share: int = 1) -> Iterator[Path]:
    """Write a model of this shape into memory, under `model`, beside what is compiled; of its layers one in `share`."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        config = configuration(shape)
        text = config.get_text_config()
        text.num_hidden_layers //= share
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
        network = network_of(config)
        # In small files: each passes through the memory in which they all lie
        network.save_pretrained(write_surroundings(config, folder / "model"), max_shard_size="4GB")
        del network
        release()
        patch.setenv("TRITON_CACHE_DIR", str(folder / "kernels"))
        yield folder


@contextmanager
def day_in(folder: Path, *options: str) -> Iterator[Day]:
    """Serve the model of a folder with these options."""
    model = ("--base-model", f"bench={folder / 'model'}", "--device", DEVICE, "--dtype", "bfloat16")
    with serving(folder, *model, *options) as server:
        try:
            server.wait_for_health()
        except Exception:
            print(server.log.read_text()[-4000:])
            raise
        with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
            yield Day(server, service)


def dense() -> Cases:
    """Deaths, a new model, and the cost of a copy."""
    with folder_with("4B") as folder:
        with day_in(folder) as day:
            yield from deaths(day, day.model(), DEATHS)
            made = [seconds(lambda: day.model(rank=8)) for _ in range(9)]
            yield "new_model", {"median_s": statistics.median(made), "slowest_s": max(made)}
        with day_in(folder, "--replay-s", str(COPIES_AFTER_S)) as day:
            yield "cost", cost(day.model(), folder / "data")


def cost(model: tinker.TrainingClient, data_dir: Path) -> Figures:
    """What a copy costs, from the steps after it."""
    data, copied = random_datums(BATCH), set[int]()
    kept = kept_copies(data_dir, model.get_info().model_id)
    times = []
    for _ in range(COPY_STEPS):
        times.append(seconds(lambda: step(model, data)))
        copied |= {int(each.name) // 2 - 1 for each in kept.glob("[0-9]*")}  # named by seq_id: two a step
    after: dict[int, list[float]] = defaultdict(list)
    since = LATE
    for number, taken in enumerate(times):
        since = 0 if number in copied else since + 1
        if number > min(copied) + LATE:  # not the first steps, which compile
            after[min(since, LATE)].append(taken)
    late = statistics.median(after.pop(LATE))
    cost_s = sum(statistics.median(each) - late for each in after.values())
    return {"copies": len(copied), "late_s": late, "copy_s": cost_s, "ratio": 1 + cost_s / TrainingConfig.replay_s}


def deaths(day: Day, model: tinker.TrainingClient, count: int) -> Cases:
    """Kill each victim after some steps, `count` times; the step behind it is sent at once."""
    data = random_datums(BATCH)
    for victim in VICTIMS:
        taken = list[float]()
        for _ in range(count):
            time.sleep(SETTLE_S)
            for _ in range(STEPS):
                step(model, data)
            server = day.server
            pid = {"worker": server.worker_pid(), "engine": server.engine_pid(), "server": server.pid}[victim]
            with ThreadPoolExecutor(1) as thread:
                sent = thread.submit(seconds, lambda: step(model, data))
                os.kill(pid, signal.SIGKILL)
                if victim == "server":
                    server.start_again()
                taken.append(sent.result())
        yield victim, {"slowest_s": max(taken), "fastest_s": min(taken)}


def experts() -> Cases:
    """Deaths beside a mixture of experts."""
    with folder_with("35B-A3B", 2) as folder, day_in(folder) as day:
        yield from deaths(day, day.model(), 1)


def many() -> Cases:
    """Two rounds over all models: every one is made, stepped, and found again."""
    data = random_datums(BATCH[:1])
    with folder_with("4B") as folder, day_in(folder) as day:
        models: list[tinker.TrainingClient] = []
        made_s = statistics.mean(seconds(lambda: models.append(day.model(rank=8))) for _ in range(MODELS))
        rounds = [statistics.mean(seconds(partial(step, model, data)) for model in models) for _ in range(2)]
    yield "", {"models": MODELS, "made_s": made_s, "first_step_s": rounds[0], "step_s": rounds[1]}


PARTS: dict[str, Callable[[], Cases]] = {"dense": dense, "experts": experts, "many": many}


def main() -> None:
    """Measure what was asked for."""
    asked = begin(__doc__, list(PARTS))
    found = {name: isolated_series(name, PARTS[name], asked.budget) for name in asked.parts}
    figure("copies_cost", found.get("dense", {}).get("cost", {}).get("ratio"), "at most 1.01")
    for part, limit_s in (("dense", 10), ("experts", 30)):
        for victim in VICTIMS:
            taken_s = found.get(part, {}).get(victim, {}).get("slowest_s")
            figure(f"{part}_{victim}_s", taken_s, f"at most {limit_s}")


if __name__ == "__main__":
    main()
