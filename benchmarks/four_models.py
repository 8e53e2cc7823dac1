"""Steps per second of four SDK processes that train four models at once, as a ratio to the same on the instant stub.

Tiny model, LoRA of rank 8, batches of 4 sequences of 32 tokens, 40 steps for each process after 5 to warm up. Both
servers take turns; median of 3.
Run it with: taskset -c 0,1 python -m benchmarks.four_models
"""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier

from tinker import types

from benchmarks.servers import API_KEY, random_datums, stub_server, tinsmith_server, training_client
from benchmarks.timing import report, seconds

PROCESSES, WARM_UP, STEPS, ROUNDS = 4, 5, 40, 3
STEP = types.AdamParams(learning_rate=1e-4)


def train(url: str, key: str, data: list[types.Datum], count: int, start: Barrier, end: Barrier) -> None:
    """One process: a model of its own, and so many steps between the two barriers."""
    with training_client(url, key) as client:

        def steps(count: int) -> None:
            for _ in range(count):
                futures = client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)
                for future in futures:
                    future.result()

        steps(WARM_UP)
        start.wait()
        steps(count)
        end.wait()


def steps_per_s(url: str, keys: Sequence[str], data: list[types.Datum], count: int = STEPS) -> float:
    """Of a process for each key together, from the moment when all are warm until the last has finished."""
    context = multiprocessing.get_context("spawn")
    start, end = context.Barrier(len(keys) + 1), context.Barrier(len(keys) + 1)
    workers = [context.Process(target=train, args=(url, key, data, count, start, end)) for key in keys]
    for worker in workers:
        worker.start()
    start.wait(timeout=120)
    elapsed = seconds(lambda: end.wait(timeout=300))
    for worker in workers:
        worker.join()
    return len(keys) * count / elapsed


def main() -> None:
    """Measure and print the line."""
    keys, data = [API_KEY] * PROCESSES, random_datums([32] * 4)
    with tinsmith_server() as ours, stub_server() as stub:
        rounds = sorted((steps_per_s(ours, keys, data), steps_per_s(stub, keys, data)) for _ in range(ROUNDS))
    ratios = sorted(mine / its for mine, its in rounds)
    mine, its = rounds[ROUNDS // 2]
    report(
        "four_models", ratios[ROUNDS // 2], "at least 0.85 of the stub's", ours_steps_per_s=mine, stub_steps_per_s=its
    )


if __name__ == "__main__":
    main()
