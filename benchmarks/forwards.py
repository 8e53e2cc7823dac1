"""One small forward of 8 tokens and its result, and many at once, with a tiny model.

- latency of a forward through SDK and server: median of 300 calls, after 30
- forwards a second of one SDK process: 64 sent at once, until the last result; median of 9 such bursts
- retrieve_future of a finished forward, raw HTTP on one connection: median of 600 calls

Run it with: taskset -c 0,1 python -m benchmarks.forwards

The first two take turns with the same calls to the instant stub, which show what the SDK and HTTP take by themselves.
"""

import statistics

import httpx
import tinker

from benchmarks.servers import API_KEY, BASE_MODEL, random_datums, stub_server, tinsmith_server, training_client
from benchmarks.timing import in_turn, report, seconds
from tests.acceptance.raw import RawModel

WARM_UP, ROUNDS, CALLS = 30, 3, 100
AT_ONCE = 64
FETCHED_BEFORE, FETCHED = 50, 600


def forward_ms(client: tinker.TrainingClient, calls: int) -> list[float]:
    """Milliseconds of each of `calls` forwards, one after the other."""
    data = random_datums([8])
    return [1000 * seconds(lambda: client.forward(data, "cross_entropy").result()) for _ in range(calls)]


def burst(client: tinker.TrainingClient) -> None:
    """Send all, then wait for all."""
    data = random_datums([8])
    for future in [client.forward(data, "cross_entropy") for _ in range(AT_ONCE)]:
        future.result()


def fetch_ms(url: str) -> list[float]:
    """Milliseconds of each time that a finished result is fetched."""
    with httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": API_KEY}, timeout=60) as http:
        model = RawModel(http, BASE_MODEL)
        request_id = model.forward_backward(1, random_datums([8]), forward_only=True)
        times = [1000 * seconds(lambda: model.output(request_id)) for _ in range(FETCHED_BEFORE + FETCHED)]
    return times[FETCHED_BEFORE:]


def main() -> None:
    """Measure and print the lines."""
    times: dict[tinker.TrainingClient, list[float]] = {}
    with (
        tinsmith_server() as ours,
        stub_server() as stub,
        training_client(ours) as client,
        training_client(stub) as stub_client,
    ):
        for each in (client, stub_client):
            forward_ms(each, WARM_UP)
            times[each] = []
        for _ in range(ROUNDS):
            for each, taken in times.items():
                taken += forward_ms(each, CALLS)
        ours_s, stub_s = in_turn(lambda: burst(client), lambda: burst(stub_client), rounds=9)
        fetched = fetch_ms(ours)
    ninety = statistics.quantiles(times[client], n=10)[-1]
    stub_ms = statistics.median(times[stub_client])
    report("forward_latency_ms", statistics.median(times[client]), "at most 8", p90=ninety, stub=stub_ms)
    report("forwards_at_once_per_s", AT_ONCE / ours_s, "at least 150", stub=AT_ONCE / stub_s)
    report("finished_future_ms", statistics.median(fetched), "at most 3", p90=statistics.quantiles(fetched, n=10)[-1])


if __name__ == "__main__":
    main()
