"""Latency of one small forward: 8 tokens, tiny model, through the SDK and the server. Median of 300 calls, after 30.

Run it with: taskset -c 0,1 python -m benchmarks.forward_latency

The same calls to the instant stub, in turn with these, show how much of it is the SDK's own.
"""

import statistics

import tinker

from benchmarks.servers import random_datums, stub_server, tinsmith_server, training_client
from benchmarks.timing import report, seconds

WARM_UP, ROUNDS, CALLS = 30, 3, 100


def forward_ms(client: tinker.TrainingClient, calls: int) -> list[float]:
    """Milliseconds of each of `calls` forwards, one after the other."""
    data = random_datums([8])
    return [1000 * seconds(lambda: client.forward(data, "cross_entropy").result()) for _ in range(calls)]


def main() -> None:
    """Measure and print the line."""
    with (
        tinsmith_server() as ours,
        stub_server() as stub,
        training_client(ours) as client,
        training_client(stub) as stub_client,
    ):
        forward_ms(client, WARM_UP)
        forward_ms(stub_client, WARM_UP)
        times: list[float] = []
        stub_times: list[float] = []
        for _ in range(ROUNDS):
            times += forward_ms(client, CALLS)
            stub_times += forward_ms(stub_client, CALLS)
    ninety = statistics.quantiles(times, n=10)[-1]
    report("forward_latency_ms", statistics.median(times), "at most 8", p90=ninety, stub=statistics.median(stub_times))


if __name__ == "__main__":
    main()
