"""Cost of observing: steps of a 30-million-parameter model while nobody reads `/metrics`, and while somebody does.

A step is forward_backward and optim_step of 8 sequences of 128 tokens on Qwen3 of width 512 with 8 layers. Both sides
take turns; median of 5 rounds of 2 steps. Then what making one report takes of a worker's time. About 2 minutes.

Run it with: taskset -c 0,1 python -m benchmarks.observing
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from benchmarks.servers import random_datums, tinsmith_server, training_client
from benchmarks.sft_step import UNIFORM, VOCABULARY, sdk_step
from benchmarks.timing import in_turn, report
from tinsmith.observing.metrics import MODEL_SAMPLED_TOKENS, WORKER, numbers
from tinsmith.observing.spans import PASSES, Span
from tinsmith.protocol.work import WorkerStatus

PAUSE_S = 0.1
"""Between two readings; Prometheus pauses 15 s or longer."""
MODELS = 200
"""Loaded models whose numbers a report has."""


@contextmanager
def scraped(url: str) -> Iterator[None]:
    """While the body runs, another thread reads `/metrics` ten times a second."""
    ended = threading.Event()

    def read() -> None:
        with httpx.Client() as client:
            while not ended.wait(PAUSE_S):
                client.get(f"{url}/metrics").raise_for_status()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()


def main() -> None:
    """Measure both and print a line for each."""
    data = random_datums(UNIFORM, VOCABULARY)
    with tinsmith_server(hidden=512, layers=8, vocab=VOCABULARY) as url, training_client(url) as client:

        def observed() -> None:
            with scraped(url):
                sdk_step(client, data)

        alone_s, observed_s = in_turn(lambda: sdk_step(client, data), observed, rounds=5, repeats=2)
    report("step_while_metrics_are_read", observed_s / alone_s, "at most 1.03", alone_s=alone_s, observed_s=observed_s)
    for number in range(MODELS):
        MODEL_SAMPLED_TOKENS.labels(f"0c9c5a3e-5f2b-4b9e-8b0e-3f6b1f0f8f53:train:{number}").inc()
    spans: list[Span] = [("backward", PASSES, time.time(), 0.01, {"requests": ["x" * 40] * 4})] * 200
    began = time.perf_counter()
    for _ in range(100):
        WorkerStatus(numbers(WORKER), spans).to_frames()
    report("report_ms", (time.perf_counter() - began) * 10, "at most 10, once a second")


if __name__ == "__main__":
    main()
