"""What tenants with keys of their own take from each other on one server.

1. Steps per second of eight that train at once, as a ratio to one alone: Qwen3 of width 512 with 8 layers (30 million
   parameters), LoRA of rank 8, one sequence of 32 tokens a step. Eight and one take turns; median of 3 rounds.
2. While one tenant has 2,000 samples waiting, another's optim_step against its median alone, and against a pass; and
   the time to its first sampled token. Tiny model.

Run it with: taskset -c 0,1 python -m benchmarks.tenants
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import tinker
from tinker import types

from benchmarks.four_models import STEP, steps_per_s
from benchmarks.servers import BASE_MODEL, random_datums, training_client
from benchmarks.sft_step import VOCABULARY
from benchmarks.timing import report, seconds
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith.store.keys import add_key
from tinsmith.store.records import ApiKey
from tinsmith.store.store import Store

TENANTS, STEPS, ROUNDS = 8, 20, 3
WAITING, SAMPLES, PASS_TOKENS = 2000, 20, 1024
LONG = types.SamplingParams(max_tokens=2000, stop=[])
FIRST = types.SamplingParams(max_tokens=1)


@contextmanager
def shared_server(tenants: int, *options: str, hidden: int = 64, layers: int = 2) -> Iterator[tuple[str, list[str]]]:
    """A server and the keys of its tenants; its base model is random."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model("qwen3", directory / "model", hidden=hidden, layers=layers, vocab=VOCABULARY)
        store = Store.open(directory / "data")
        keys = [add_key(store, ApiKey(f"t{n}", "", b"", f"t{n}", "member")) for n in range(tenants)]
        store.close()
        shape = "--base-model", f"{BASE_MODEL}={directory / 'model'}", "--kv-cache-gib", "0.5"
        with serving(directory, *shape, *options) as server:
            server.wait_for_health()
            yield server.url, keys


def eight_at_once() -> None:
    """Measure and print the first line."""
    data = random_datums([32], VOCABULARY)
    with shared_server(TENANTS, hidden=512, layers=8) as (url, keys):
        rounds = [tuple(steps_per_s(url, some, data, STEPS) for some in (keys, keys[:1])) for _ in range(ROUNDS)]
    eight, one = (statistics.median(column) for column in zip(*rounds, strict=True))
    ratio = statistics.median(mine / its for mine, its in rounds)
    load = os.getloadavg()[0]
    report("eight_tenants_steps", ratio, "at least 1.6 times those of one", eight_per_s=eight, one_per_s=one, load=load)


def beside_many_samples() -> None:
    """Measure and print the lines of a tenant beside one with 2,000 samples waiting."""
    with shared_server(2) as (url, keys), training_client(url, api_key=keys[0]) as client:
        work = random_datums([PASS_TOKENS], VOCABULARY)
        passes = [seconds(lambda: client.forward_backward(work, "cross_entropy").result()) for _ in range(5)]
        sampler = client.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(list(range(16)))

        def first_token() -> None:
            sampler.sample(prompt, 1, FIRST).result()

        def step() -> None:
            client.optim_step(STEP).result()

        def taken() -> tuple[list[float], list[float]]:
            return [seconds(step) for _ in range(SAMPLES)], [seconds(first_token) for _ in range(SAMPLES)]

        taken()
        steps_alone, tokens_alone = taken()
        with tinker.ServiceClient(base_url=url, api_key=keys[1]) as greedy:
            long = greedy.create_sampling_client(base_model=BASE_MODEL).result()
            asked = [long.sample(types.ModelInput.from_ints([1 + n % 1000, 5]), 4, LONG) for n in range(WAITING // 4)]
            _wait_for_samples(url, keys[0])
            steps, tokens = taken()
            ended = sum(each.future().done() for each in asked)
    load, delay = os.getloadavg()[0], max(steps) - statistics.median(steps_alone)
    one_pass = statistics.median(passes)
    report(
        "longest_delay_of_a_step_beside_2000_samples_ms",
        1000 * delay,
        f"at most {1000 * one_pass:.0f}, a pass of {PASS_TOKENS} tokens",
        median=1000 * statistics.median(steps),
        alone=1000 * statistics.median(steps_alone),
        ended=ended,
        load=load,
    )
    report(
        "longest_wait_for_a_first_token_beside_2000_samples_ms",
        1000 * max(tokens),
        "at most 1000",
        median=1000 * statistics.median(tokens),
        alone=1000 * statistics.median(tokens_alone),
    )


def _wait_for_samples(url: str, key: str) -> None:
    """Wait until all samples have come and as many run as can."""
    with httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}) as http:
        while sum(http.get("status").json()["samples"].values()) < WAITING:
            time.sleep(0.1)


def main() -> None:
    """Measure and print the lines."""
    beside_many_samples()
    eight_at_once()


if __name__ == "__main__":
    main()
