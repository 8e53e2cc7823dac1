"""What it takes to fetch a result that is there: retrieve_future of a finished forward, raw HTTP on one connection.

Median of 600 calls.

Run it with: taskset -c 0,1 python -m benchmarks.finished_future
"""

import statistics

import httpx

from benchmarks.servers import API_KEY, BASE_MODEL, random_datums, tinsmith_server
from benchmarks.timing import report, seconds
from tests.acceptance.raw import RawModel

WARM_UP, CALLS = 50, 600


def main() -> None:
    """Measure and print the line."""
    with (
        tinsmith_server() as url,
        httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": API_KEY}, timeout=60) as http,
    ):
        model = RawModel(http, BASE_MODEL)
        request_id = model.forward_backward(1, random_datums([8]), forward_only=True)
        times = [1000 * seconds(lambda: model.output(request_id)) for _ in range(WARM_UP + CALLS)][WARM_UP:]
    report("finished_future_ms", statistics.median(times), "at most 3", p90=statistics.quantiles(times, n=10)[-1])


if __name__ == "__main__":
    main()
