"""Seconds from `tinsmith serve` to the first finished forward_backward of a tiny model, with a warm disk cache.

The first launch only brings the files of Python and torch into the disk cache; the median of the next three counts.
Run it with: taskset -c 0,1 python -m benchmarks.launch
"""

import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.servers import BASE_MODEL, random_datums
from benchmarks.timing import report
from tests.acceptance.raw import RawModel
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model

LAUNCHES = 4


def launch(directory: Path, model: Path) -> tuple[float, float]:
    """Seconds until healthz is 200, and until the first forward_backward is finished."""
    directory.mkdir()
    started = time.perf_counter()
    with serving(directory, "--base-model", f"{BASE_MODEL}={model}") as server:
        server.wait_for_health()
        ready_s = time.perf_counter() - started
        with httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": "tml-benchmark"}, timeout=60) as http:
            client = RawModel(http, BASE_MODEL)
            client.output(client.forward_backward(1, random_datums([8])))
        return ready_s, time.perf_counter() - started


def main() -> None:
    """Launch and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny_model("qwen3", model)
        times = [launch(Path(folder) / str(number), model) for number in range(LAUNCHES)][1:]
    ready, finished = (statistics.median(column) for column in zip(*times, strict=True))
    report("launch_s", finished, "at most 12", until_ready=ready)


if __name__ == "__main__":
    main()
