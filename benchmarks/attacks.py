"""How much attacks, cheap to send and dear to serve, slow down a neighbour's heartbeat, text sample and training step.

A server process with two tiny base models, one of them with vision. The neighbour asks over plain HTTP, one question
after the other. Each attack runs in a process of its own, as fast as it gets answers; its bodies are built before. The
neighbour is measured in pairs, without an attack and while it runs, and the medians are compared. All the time two more
processes compute, as on a machine that has other work. `python -m benchmarks.attacks NAME...` runs some of them.

Run it with: taskset -c 0,1 python -m benchmarks.attacks
"""

import base64
import io
import itertools
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import httpx
import orjson
import zstandard
from PIL import Image
from tinker import types

from benchmarks.servers import BASE_MODEL, random_datums, tinsmith_server
from benchmarks.timing import report, seconds
from tests.acceptance.raw import RawModel
from tinsmith.models.tiny import write_tiny_model
from tinsmith.wire import tinker_pb2 as pb

VISION_MODEL = "vision"
PAIRS, MEASURED_S, ROUNDS, HEARTBEATS = 2, 5.0, 4, 10
"""Pairs of measurements, without and with each attack; least seconds and rounds of each; heartbeats of a round."""
BUSY = 2
"""Processes that compute meanwhile."""

PROCESSES = multiprocessing.get_context("spawn")
ZSTD = {"Content-Encoding": "zstd"}
JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}

Send = Callable[[int], object]
"""Sends the attack once more; the number is another each time."""


class Client:
    """A session with a sampling session, over plain HTTP."""

    def __init__(self, url: str, base_model: str = BASE_MODEL) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", timeout=600)
        self.session_id = self.http.post("create_session", json={}).json()["session_id"]
        asked = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": base_model}
        self.sampler = self.http.post("create_sampling_session", json=asked).json()["sampling_session_id"]

    def sample_body(
        self, seq_id: int, max_tokens: int = 8, num_samples: int = 1, chunks: object = None, **params: object
    ) -> bytes:
        """An asample body."""
        prompt = {"chunks": chunks or [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
        asked = {"sampling_session_id": self.sampler, "seq_id": seq_id, "num_samples": num_samples, "prompt": prompt}
        return orjson.dumps(asked | {"sampling_params": {"max_tokens": max_tokens} | params})

    def sample(self, body: bytes, wait: bool = True) -> int:
        """Send a sample, and wait for its result; returns the HTTP status."""
        reply = self.http.post("asample", content=body, headers=JSON)
        if wait and reply.status_code == 200:
            reply = self.http.post("retrieve_future", json={"request_id": reply.json()["request_id"]})
        return reply.status_code


class Neighbour:
    """Who sends nothing out of the ordinary."""

    def __init__(self, url: str) -> None:
        self.client = Client(url)
        self.model = RawModel(self.client.http, BASE_MODEL)
        self.data = random_datums([128])
        self.samples, self.operations = itertools.count(1), itertools.count(1)

    def heartbeat(self) -> None:
        assert (
            self.client.http.post("session_heartbeat", json={"session_id": self.client.session_id}).status_code == 200
        )

    def sample(self) -> None:
        assert self.client.sample(self.client.sample_body(next(self.samples))) == 200

    def step(self) -> None:
        first, second = next(self.operations), next(self.operations)
        self.model.forward_backward(first, self.data)
        self.model.result(self.model.optim_step(second, types.AdamParams(learning_rate=1e-4)))

    def measure(self, times: dict[str, list[float]]) -> None:
        """Add the seconds of each question."""
        end, rounds = time.monotonic() + MEASURED_S, len(times["step"]) + ROUNDS
        while time.monotonic() < end or len(times["step"]) < rounds:
            times["heartbeat"] += [seconds(self.heartbeat) for _ in range(HEARTBEATS)]
            times["sample"].append(seconds(self.sample))
            times["step"].append(seconds(self.step))


# ---- Attacks. Each is set up with the URL, and returns what is then sent again and again, by so many threads.


def stop_strings(url: str) -> Send:
    """As many stop strings and stop ids as are taken, for 64 sequences; and more than are taken."""
    client = Client(url)
    strings = [f"{number:x}".rjust(16, "z") for number in range(256)]

    def send(number: int) -> None:
        stop: list[object] = [*strings] if number % 2 else [*range(1, 2**14)]
        client.sample(client.sample_body(number, max_tokens=64, num_samples=64, stop=stop))
        client.sample(client.sample_body(number, stop=[f"{number}" for number in range(300_000)]))

    return send


def polls(url: str) -> Send:
    """1.3 million ids in half a kilobyte, and as many as are taken."""
    client = Client(url)
    head = (
        b'{"target": {"sampling_session_id": "%s"}, "timeout": 0, "retrieved_request_ids": [' % client.sampler.encode()
    )
    bodies = [zstandard.compress(head + b'"x",' * (count - 1) + b'"x"]}') for count in (1_300_000, 2**16)]

    def send(number: int) -> None:
        for path in ("retrieve_futures", "telemetry"):
            client.http.post(path, content=bodies[number % 2], headers=JSON | ZSTD)

    return send


def jpeg(number: int) -> bytes:
    """A progressive one of 49 megapixels, unlike those of other numbers."""
    file = io.BytesIO()
    Image.new("RGB", (7000, 7000), (number % 256, number // 256 % 256, 0)).save(file, "jpeg", progressive=True)
    return file.getvalue()


def images(url: str) -> Send:
    """Prompts of four large JPEGs, all of them new."""
    client = Client(url, VISION_MODEL)
    whole = jpeg(0)

    def send(number: int) -> None:
        data = [base64.b64encode(whole + number.to_bytes(4, "big") + bytes([place])).decode() for place in range(4)]
        chunks = [{"type": "image", "data": each, "format": "jpeg"} for each in data]
        client.sample(client.sample_body(number, chunks=chunks), wait=number % 4 == 0)

    return send


def trained_images(url: str) -> Send:
    """Training on such images, each a datum."""
    client = Client(url)
    model, whole = RawModel(client.http, VISION_MODEL), jpeg(0)

    def request(number: int, positions: int) -> dict[str, object]:
        targets = pb.Tensor(dtype=pb.DTYPE_INT64, dense=bytes(8 * positions), shape=[positions])
        datums = []
        for place in range(4):
            image = pb.ImageChunk(data=whole + number.to_bytes(4, "big") + bytes([place]), format="jpeg")
            datums.append(pb.Datum(model_input=[pb.Chunk(image=image)], loss_fn_inputs={"target_tokens": targets}))
        message = pb.ForwardBackwardRequest(
            model_id=model.model_id, seq_id=number + 1, data=datums, loss_fn="cross_entropy"
        )
        return {"request_id": model.submit_protobuf(message.SerializeToString())}

    refused = client.http.post("retrieve_future", json=request(0, 1)).text
    found = re.search(r"the model input has (\d+) positions", refused)
    assert found, refused

    def send(number: int) -> None:
        client.http.post("retrieve_future", json=request(number, int(found[1])))

    return send


def long_ids(url: str) -> Send:
    """An id of 100 MB in 3 kilobytes."""
    client = Client(url)
    message = zstandard.compress(pb.ForwardBackwardRequest(model_id="x" * 10**8, seq_id=1).SerializeToString())
    asked = zstandard.compress(client.sample_body(1).replace(client.sampler.encode(), b"x" * 5 * 10**7))

    def send(number: int) -> None:
        path, body, kind = ("asample", asked, JSON) if number % 2 else ("forward_backward", message, PROTOBUF)
        client.http.post(path, content=body, headers=kind | ZSTD)

    return send


def zero_chunks(url: str) -> Send:
    """60 million times token 0, for an operation that is not due."""
    client = Client(url)
    model = RawModel(client.http, BASE_MODEL)
    zeros = pb.Datum(model_input=[pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=bytes(4 * 60_000_000)))])
    rest = zstandard.compress(pb.ForwardBackwardRequest(data=[zeros]).SerializeToString())

    def send(number: int) -> None:
        key = pb.ForwardBackwardRequest(
            model_id=model.model_id, seq_id=10**6 + number, loss_fn="cross_entropy"
        ).SerializeToString()
        client.http.post("forward_backward", content=zstandard.compress(key) + rest, headers=PROTOBUF | ZSTD)

    return send


def ended_sessions(url: str) -> Send:
    """Eight sequences of 4,000 tokens; then the session ends.

    What a single sequence takes nobody is spared, so none is longer.
    """
    http = Client(url).http
    data = random_datums([4_000] * 8)

    def send(_: int) -> None:
        model = RawModel(http, BASE_MODEL)
        request_id = model.forward_backward(1, data)
        time.sleep(0.5)
        http.post(f"sessions/{model.model_id.partition(':')[0]}/finish", json={"reason": {"type": "success"}})
        model.result(request_id)

    return send


def idle_connections(url: str) -> Send:
    """A thousand connections that send nothing, half a header or half a body."""
    host, port = url.removeprefix("http://").split(":")
    head = (
        b"POST /api/v1/telemetry HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
    )
    beginnings = itertools.cycle((b"", head, head + b"\r\n{"))
    kept: list[socket.socket] = []

    def send(_: int) -> None:
        while len(kept) < 1000:
            kept.append(socket.create_connection((host, int(port))))
            kept[-1].sendall(next(beginnings))
        time.sleep(0.1)

    return send


ATTACKS: dict[str, tuple[Callable[[str], Send], int]] = {
    "stop_strings": (stop_strings, 1),
    "polls": (polls, 6),
    "images": (images, 2),
    "trained_images": (trained_images, 1),
    "long_ids": (long_ids, 2),
    "zero_chunks": (zero_chunks, 2),
    "ended_sessions": (ended_sessions, 1),
    "idle_connections": (idle_connections, 1),
}
"""What is set up, and how many threads send it."""


def run_attack(name: str, url: str, ready: Event, stop: Event) -> None:
    """Attack until told to stop."""
    attack, threads = ATTACKS[name]
    send, numbers = attack(url), itertools.count(1)

    def again() -> None:
        while not stop.is_set():
            send(next(numbers))
            ready.set()

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(again) for _ in range(threads)]
        for each in running:
            each.add_done_callback(lambda _: stop.set())
    for each in running:
        each.result()


def compute(stop: Event) -> None:
    """Compute until told to stop."""
    while not stop.is_set():
        sum(range(10**5))


@contextmanager
def busy_machine() -> Iterator[None]:
    """While the body runs, other processes compute."""
    stop = PROCESSES.Event()
    processes = [PROCESSES.Process(target=compute, args=(stop,)) for _ in range(BUSY)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join()


@contextmanager
def attacking(name: str, url: str) -> Iterator[None]:
    """While the body runs, the attack does, which has been answered once."""
    ready, stop = PROCESSES.Event(), PROCESSES.Event()
    process = PROCESSES.Process(target=run_attack, args=(name, url, ready, stop))
    process.start()
    while not ready.wait(1):
        assert process.is_alive(), f"{name} has failed"
    try:
        yield
        assert not stop.is_set(), f"{name} has failed"
    finally:
        stop.set()
        process.join()


def main() -> None:
    """Measure and print the lines."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model("qwen3-vl", Path(folder))
        for name in sys.argv[1:] or ATTACKS:  # each on a server that no other has attacked
            without, during = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
            with tinsmith_server("--base-model", f"{VISION_MODEL}={folder}") as url, busy_machine():
                neighbour = Neighbour(url)
                neighbour.step()
                for _ in range(PAIRS):
                    neighbour.measure(without)
                    with attacking(name, url):
                        neighbour.measure(during)
            for question, times in during.items():
                report(
                    f"{question}_while_{name}",
                    statistics.median(times) / statistics.median(without[question]),
                    "at most 3 times",
                    median_ms=1000 * statistics.median(times),
                    worst_ms=1000 * max(times),
                    without_ms=1000 * statistics.median(without[question]),
                    worst_without_ms=1000 * max(without[question]),
                    load=os.getloadavg()[0],
                )


if __name__ == "__main__":
    main()
