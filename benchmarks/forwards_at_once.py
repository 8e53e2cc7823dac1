"""How many small forwards a second one SDK process gets: 64 of 8 tokens sent at once, until the last result.

Median of 9 such bursts.

Run it with: taskset -c 0,1 python -m benchmarks.forwards_at_once

The same bursts to the instant stub, in turn with these, show what the SDK and HTTP allow on the same cores.
"""

import tinker

from benchmarks.servers import random_datums, stub_server, tinsmith_server, training_client
from benchmarks.timing import in_turn, report

COUNT = 64


def burst(client: tinker.TrainingClient) -> None:
    """Send all, then wait for all."""
    data = random_datums([8])
    for future in [client.forward(data, "cross_entropy") for _ in range(COUNT)]:
        future.result()


def main() -> None:
    """Measure and print the line."""
    with (
        tinsmith_server() as ours,
        stub_server() as stub,
        training_client(ours) as client,
        training_client(stub) as stub_client,
    ):
        ours_s, stub_s = in_turn(lambda: burst(client), lambda: burst(stub_client), rounds=9)
    report("forwards_at_once_per_s", COUNT / ours_s, "at least 150", stub=COUNT / stub_s)


if __name__ == "__main__":
    main()
