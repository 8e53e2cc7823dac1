"""How fast the server answers livez and session_heartbeat while 64 requests of 8 MB with images arrive at once.

Three processes: a server with its engine (tiny vision-language model), one that sends the 64 requests over 64
connections, and one that asks each of the two questions every 10 ms, however late the answers are: milliseconds from
the time that a question was due to its answer. First for five seconds at rest, then until the last of the 64 is
accepted; three times, each with new images. Once for forward_backward (8 images of 1 MB, in 8 datums) and once for
samples (6 such images in base64). The engine works on what has arrived.

Run it with: taskset -c 0,1 python -m benchmarks.responsive
"""

import asyncio
import base64
import gc
import io
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.synchronize import Event

import httpx
import numpy as np
from PIL import Image
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from benchmarks.servers import BASE_MODEL, tinsmith_server
from benchmarks.timing import report
from tests.acceptance.raw import RawModel

AT_ONCE, ROUNDS, EVERY_S, AT_REST_S = 64, 3, 0.01, 5.0
WIDTH, TOKENS = 576, 18 * 18
"""Of an image in pixels, and the positions that it takes."""

UNLIMITED = (
    "--max-queued-session-mib",
    "8192",
    "--max-pending-sample-mib-per-session",
    "8192",
    "--max-pending-sample-mib",
    "8192",
)
"""No request is to be refused because the engine has not come to the earlier ones."""

FORK = multiprocessing.get_context("fork")
"""The processes begin with what is loaded and built here: no time goes into imports while it is measured."""


@cache
def noise() -> bytes:
    """A PNG that cannot be compressed."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (WIDTH, WIDTH, 3), dtype=np.uint8)).save(
        file, "png", compress_level=0
    )
    return file.getvalue()


def image(number: int) -> bytes:
    """An image of 1 MB that no other number has: the number stands behind its end, which decoders pass over."""
    return noise() + number.to_bytes(4, "big")


def forward_backward_body(model_id: str, seq_id: int, images: list[bytes]) -> bytes:
    """A datum for each image, in protobuf."""
    datums = []
    for data in images:
        text, image = (
            types.EncodedTextChunk(tokens=[1, 2]),
            types.ImageChunk(data=data, format="png", expected_tokens=TOKENS),
        )
        targets = types.TensorData.from_numpy(np.ones(2 + TOKENS, dtype=np.int64))
        datums.append(
            types.Datum(model_input=types.ModelInput(chunks=[text, image]), loss_fn_inputs={"target_tokens": targets})
        )
    content = types.ForwardBackwardInput(data=datums, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=content, model_id=model_id, seq_id=seq_id)
    return forward_backward_request_to_proto(request).SerializeToString()


def sample_body(sampling_session_id: str, seq_id: int, images: list[bytes]) -> bytes:
    """A prompt of all images, in JSON."""
    chunks = [
        {"type": "image", "data": base64.b64encode(data).decode(), "format": "png", "expected_tokens": TOKENS}
        for data in images
    ]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, *chunks]}
    asked = {
        "sampling_session_id": sampling_session_id,
        "seq_id": seq_id,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 1},
    }
    return json.dumps(asked).encode()


def send_all(url: str, path: str, bodies: list[bytes]) -> None:
    """POST every body on a connection of its own, all at once; each must be accepted."""
    host, port = url.removeprefix("http://").split(":")
    media_type = "application/x-protobuf" if path == "forward_backward" else "application/json"

    async def send(body: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {media_type}\r\nContent-Length: "
            f"{len(body)}\r\n\r\n"
        )
        writer.write(head.encode())
        view = memoryview(body)
        for start in range(0, len(body), 2**18):
            writer.write(view[start : start + 2**18])
            await writer.drain()
        status = await reader.readline()
        assert b" 200 " in status, status + await reader.read(4096)
        writer.close()

    async def run() -> None:
        await asyncio.gather(*(send(body) for body in bodies))

    asyncio.run(run())


class Probe:
    """Asks one question again and again over connections that stay open."""

    def __init__(self, url: str, request: bytes) -> None:
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)
        self.request = request
        self.free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.times_ms: list[float] = []

    async def ask(self, due: float) -> None:
        """One question, on a connection that has none open."""
        reader, writer = self.free.pop() if self.free else await asyncio.open_connection(self.host, self.port)
        writer.write(self.request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        size = next(
            int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length")
        )
        await reader.readexactly(size)
        self.times_ms.append(1000 * (asyncio.get_running_loop().time() - due))
        self.free.append((reader, writer))


def probe(
    url: str, session_id: str, stop: Event, times: "multiprocessing.queues.Queue[dict[str, list[float]]]"
) -> None:
    """Ask until told to stop, then say how long each answer took."""
    beat = json.dumps({"session_id": session_id}).encode()
    head = b"POST /api/v1/session_heartbeat HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: "
    probes = {
        "livez": Probe(url, b"GET /api/v1/livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
        "heartbeat": Probe(url, head + str(len(beat)).encode() + b"\r\n\r\n" + beat),
    }

    async def run() -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as tasks:
            while not stop.is_set():
                for one in probes.values():
                    tasks.create_task(one.ask(due))
                due += EVERY_S
                await asyncio.sleep(due - loop.time())

    gc.disable()
    asyncio.run(run())
    times.put({name: one.times_ms for name, one in probes.items()})


@contextmanager
def probing(url: str, session_id: str, into: dict[str, list[float]]) -> Iterator[None]:
    """Add to `into`, by question, how long answers take meanwhile, in milliseconds."""
    stop, times = FORK.Event(), FORK.Queue()
    process = FORK.Process(target=probe, args=(url, session_id, stop, times))
    process.start()
    time.sleep(0.5)
    yield
    stop.set()
    for name, measured in times.get().items():
        into.setdefault(name, []).extend(measured)
    process.join()


def measure(url: str, path: str, body_of: Callable[[int, list[bytes]], bytes], session_id: str) -> None:
    """At rest and while requests arrive; prints the lines."""
    resting: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {}
    with probing(url, session_id, resting):
        time.sleep(AT_REST_S)
    per_body = 8 if path == "forward_backward" else 6
    took = []
    for turn in range(ROUNDS):
        first = 1 + turn * AT_ONCE
        bodies = [
            body_of(seq_id, [image(seq_id * per_body + n) for n in range(per_body)])
            for seq_id in range(first, first + AT_ONCE)
        ]
        sender = FORK.Process(target=send_all, args=(url, path, bodies))
        with probing(url, session_id, busy):
            started = time.perf_counter()
            sender.start()
            sender.join()
            took.append(time.perf_counter() - started)
        assert sender.exitcode == 0
    for name, times_ms in busy.items():
        cuts, rest = statistics.quantiles(times_ms, n=100), statistics.quantiles(resting[name], n=100)
        report(
            f"{name}_p99_ms_while_{path}_arrives",
            cuts[98],
            "at most 50",
            p50=cuts[49],
            longest=max(times_ms),
            at_rest_p50=rest[49],
            at_rest_p99=rest[98],
            body_mb=len(bodies[0]) / 1e6,
            round_s=statistics.median(took),
            load=os.getloadavg()[0],
        )


def main() -> None:
    """Measure and print the lines."""
    with (
        tinsmith_server(*UNLIMITED, kind="qwen3-vl") as url,
        httpx.Client(base_url=f"{url}/api/v1", timeout=60) as http,
    ):
        model = RawModel(http, BASE_MODEL)
        session_id = model.model_id.partition(":")[0]
        measure(
            url,
            "forward_backward",
            lambda seq_id, images: forward_backward_body(model.model_id, seq_id, images),
            session_id,
        )
    with (
        tinsmith_server(*UNLIMITED, kind="qwen3-vl") as url,
        httpx.Client(base_url=f"{url}/api/v1", timeout=60) as http,
    ):
        session_id = http.post("create_session", json={}).json()["session_id"]
        asked = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
        sampler = http.post("create_sampling_session", json=asked).json()["sampling_session_id"]
        measure(url, "asample", lambda seq_id, images: sample_body(sampler, seq_id, images), session_id)


if __name__ == "__main__":
    main()
