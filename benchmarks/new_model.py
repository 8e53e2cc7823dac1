"""A new LoRA model of rank 8 on a warm server: from create_model to its answer, raw HTTP on one connection.

Median of 20, on the tiny model and on Qwen3 of width 512 with 8 layers (30 million parameters). Then it can be trained.

Run it with: taskset -c 0,1 python -m benchmarks.new_model
"""

import os
import statistics

import httpx

from benchmarks.servers import API_KEY, BASE_MODEL, tinsmith_server
from benchmarks.sft_step import VOCABULARY
from benchmarks.timing import report, seconds

MODELS = 20


def created_ms(url: str) -> list[float]:
    """Milliseconds for each of some models."""
    numbers = iter(range(MODELS + 1))
    with httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": API_KEY}, timeout=60) as http:
        session = http.post("create_session", json={}).json()["session_id"]

        def create() -> None:
            body = {"session_id": session, "model_seq_id": next(numbers), "base_model": BASE_MODEL}
            made = http.post("create_model", json=body | {"lora_config": {"rank": 8}}).json()
            assert http.post("retrieve_future", json={"request_id": made["request_id"]}).status_code == 200

        create()
        return [1000 * seconds(create) for _ in range(MODELS)]


def main() -> None:
    """Measure both and print the lines."""
    for name, hidden, layers in (("tiny", 64, 2), ("30m", 512, 8)):
        with tinsmith_server(hidden=hidden, layers=layers, vocab=VOCABULARY) as url:
            times = created_ms(url)
        load = os.getloadavg()[0]
        report(f"new_lora_model_{name}_ms", statistics.median(times), "at most 100", slowest=max(times), load=load)


if __name__ == "__main__":
    main()
