"""Seconds from killing a busy worker (SIGKILL) until work is taken again, and what becomes of the work that it had.

Run it with: taskset -c 0,1 python -m benchmarks.worker_death

A tiny model. Three times: 16 forward_backward calls are sent, the worker is killed during them, and a new model is
trained one step as soon as that works. The time is from the kill to the end of that step, through the SDK, which asks
again by itself.
"""

import os
import re
import signal
import statistics
import time

import psutil
import tinker
from tinker import types

from benchmarks.servers import API_KEY, BASE_MODEL, random_datums, tinsmith_server
from benchmarks.timing import report

ROUNDS, CALLS = 3, 16


def worker_of(engine: psutil.Process) -> psutil.Process:
    """The worker of an engine."""
    return next(child for child in engine.children() if child.name() == "worker")


def engine_of_this_server() -> psutil.Process:
    """The engine of the server that this process has started."""
    found = [
        child for child in psutil.Process().children(recursive=True) if "tinsmith.engine" in " ".join(child.cmdline())
    ]
    return found[0]


def one_round(url: str, engine: psutil.Process) -> tuple[float, int, int]:
    """Seconds until a new model has trained, and how many of the calls that were under way succeeded and failed."""
    data = random_datums([256] * 8)
    with tinker.ServiceClient(base_url=url, api_key=API_KEY) as service:
        client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        client.forward(data, "cross_entropy").result()
        under_way = [client.forward_backward(data, "cross_entropy") for _ in range(CALLS)]
        under_way[0].result()
        killed = worker_of(engine)
        os.kill(killed.pid, signal.SIGKILL)
        started = time.monotonic()
        other = service.create_lora_training_client(base_model=BASE_MODEL, rank=8).result()
        passed, stepped = (
            other.forward_backward(data, "cross_entropy"),
            other.optim_step(types.AdamParams(learning_rate=1e-4)),
        )
        passed.result()
        stepped.result()
        seconds = time.monotonic() - started
        failed = 0
        for future in under_way:
            try:
                future.result()
            except tinker.RequestFailedError as error:
                if not re.search(r"the worker process ended unexpectedly \(signal 9\)", str(error)):
                    raise
                failed += 1
        assert psutil.Process(engine.pid).create_time() == engine.create_time(), "the engine was replaced"
        return seconds, CALLS - failed, failed


def main() -> None:
    """Measure and print the line."""
    with tinsmith_server() as url:
        engine = engine_of_this_server()
        rounds = [one_round(url, engine) for _ in range(ROUNDS)]
    times = [seconds for seconds, _, _ in rounds]
    report(
        "worker_death_s",
        statistics.median(times),
        "at most 20",
        slowest=max(times),
        succeeded=sum(done for _, done, _ in rounds),
        failed=sum(failed for _, _, failed in rounds),
    )


if __name__ == "__main__":
    main()
