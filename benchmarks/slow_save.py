"""How long the optim_step of one client takes while another saves a checkpoint of 500 MB to a slow object store.

Run it with: taskset -c 0,1 python -m benchmarks.slow_save

The store is a local S3 server whose uploads wait 0.2 s a part. The client that saves trains all the weights of a model
of 42 million parameters; the other trains an adapter on the same base, one optim_step after the other. A pass is that
adapter's forward_backward of 1,024 tokens: the step may be delayed by no more than one of them.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import boto3
import tinker
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from tinker import types
from werkzeug.serving import make_server

from benchmarks.servers import API_KEY, BASE_MODEL, random_datums, tinsmith_server
from benchmarks.timing import report, seconds

UPLOAD_S = 0.2
BASELINE = 30
STEP = types.AdamParams(learning_rate=1e-4)


@contextmanager
def slow_bucket() -> Iterator[str]:
    """The URL of an empty bucket in an S3 server, in threads of this process, that takes its time for every upload."""
    store = DomainDispatcherApplication(create_backend_app)

    def slow(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("PUT", "POST"):
            time.sleep(UPLOAD_S)
        answered: Iterable[bytes] = store(environ, start_response)
        return answered

    server = make_server("127.0.0.1", 0, slow, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    boto3.resource("s3").create_bucket(Bucket="slow")
    try:
        yield "s3://slow/checkpoints"
    finally:
        server.shutdown()


def main() -> None:
    """Measure and print the line."""
    with (
        slow_bucket() as bucket,
        tinsmith_server("--checkpoint-root", bucket, hidden=768, layers=3, vocab=24576) as url,
        tinker.ServiceClient(base_url=url, api_key=API_KEY) as service,
    ):
        saving = service.create_lora_training_client(base_model=BASE_MODEL, rank=0, seed=0).result()
        saving.forward_backward(random_datums([64]), "cross_entropy").result()
        saving.optim_step(STEP).result()  # so that there are moments to save
        client = service.create_lora_training_client(base_model=BASE_MODEL, rank=8, seed=0).result()
        work = random_datums([1024])
        passes = [seconds(lambda: client.forward_backward(work, "cross_entropy").result()) for _ in range(5)]
        alone = [seconds(lambda: client.optim_step(STEP).result()) for _ in range(BASELINE)]
        started = time.monotonic()
        beside: list[float] = []
        with ThreadPoolExecutor(1) as thread:
            saved = thread.submit(saving.save_state("large").result)
            while not saved.done():
                beside.append(seconds(lambda: client.optim_step(STEP).result()))
        path, took = saved.result().path, time.monotonic() - started
        (size,) = [
            checkpoint.size_bytes
            for checkpoint in tinker.RestClient(base_url=url, api_key=API_KEY)
            .list_user_checkpoints()
            .result()
            .checkpoints
            if checkpoint.tinker_path == path
        ]
    report(
        "slow_save_longest_step_ms",
        1000 * max(beside),
        f"at most {1000 * (statistics.median(alone) + statistics.median(passes)):.0f} (a step alone and one pass)",
        alone=1000 * statistics.median(alone),
        median=1000 * statistics.median(beside),
        one_pass=1000 * statistics.median(passes),
        steps=len(beside),
        save_s=took,
        mb=(size or 0) / 1e6,
    )


if __name__ == "__main__":
    main()
