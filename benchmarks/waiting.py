"""How fast the server answers heartbeats, and takes operations, while 8,192 long polls wait.

The polls wait on connections of their own for 8,192 operations of a model whose first one is withheld, so that none of
them runs; each poll is answered 408 after half a minute, and sent again. A process asks for a heartbeat every 10 ms,
however late the answers are, for half a minute. Then 16 connections submit forward_backwards of 8 tokens, one behind
the other, to a second model of that kind for 10 s. Tiny model; server, engine, worker and clients share two cores.

Run it with: taskset -c 0,1 python -m benchmarks.waiting [--http-servers 2]
"""

import asyncio
import itertools
import json
import os
import resource
import statistics
import sys
import time
from multiprocessing.synchronize import Event

import httpx
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from benchmarks.responsive import FORK, probing
from benchmarks.servers import API_KEY, BASE_MODEL, random_datums, tinsmith_server
from benchmarks.timing import report
from tests.acceptance.raw import RawModel

POLLS, PROBED_S = 8192, 35.0
CONNECTIONS, SUBMITTED_S = 16, 10.0
AT_A_TIME = 64
"""Connections that are opened, or operations submitted, side by side."""


def request(path: str, body: bytes, media_type: str) -> bytes:
    """A whole HTTP request."""
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {API_KEY}\r\nContent-Type: {media_type}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def forward_backward(model_id: str, seq_id: int) -> bytes:
    """A request with 8 tokens."""
    content = types.ForwardBackwardInput(data=random_datums([8]), loss_fn="cross_entropy")
    asked = types.ForwardBackwardRequest(forward_backward_input=content, model_id=model_id, seq_id=seq_id)
    body = forward_backward_request_to_proto(asked).SerializeToString()
    return request("forward_backward", body, "application/x-protobuf")


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: bytes) -> None:
    """Wait for an answer, which must be 200."""
    writer.write(asked)
    head = await reader.readuntil(b"\r\n\r\n")
    size = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
    body = await reader.readexactly(size)
    assert b" 200 " in head.splitlines()[0], body


async def submit_all(host: str, port: int, requests: "itertools.chain[bytes] | list[bytes]", until: float) -> int:
    """Submit until a time (monotonic), over several connections; returns how many were taken."""
    left, taken = iter(requests), 0

    async def submit() -> None:
        nonlocal taken
        reader, writer = await asyncio.open_connection(host, port)
        for each in left:
            await ask(reader, writer, each)
            taken += 1
            if time.monotonic() >= until:
                break
        writer.close()

    await asyncio.gather(*(submit() for _ in range(CONNECTIONS)))
    return taken


def poll_all(url: str, model_id: str, all_wait: Event, stop: Event) -> None:
    """Keep a poll waiting for each operation."""
    host, port = url.removeprefix("http://").split(":")

    async def poll(seq_id: int, opening: asyncio.Semaphore) -> None:
        asked = request(
            "retrieve_future", json.dumps({"request_id": f"{model_id}/{seq_id}"}).encode(), "application/json"
        )
        async with opening:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(asked)
            await asyncio.sleep(0.05)
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 408 " in head.splitlines()[0], head
            await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
            writer.write(asked)

    async def run() -> None:
        opening = asyncio.Semaphore(AT_A_TIME)
        polls = [asyncio.create_task(poll(seq_id, opening)) for seq_id in range(2, POLLS + 2)]
        await asyncio.sleep(0)
        for _ in range(AT_A_TIME):  # behind all polls
            await opening.acquire()
        all_wait.set()
        await asyncio.to_thread(stop.wait)
        assert not any(each.done() for each in polls)
        for each in polls:
            each.cancel()

    asyncio.run(run())


def submitted_per_s(url: str, model_id: str) -> float:
    """Operations that are taken in a second."""
    host, port = url.removeprefix("http://").split(":")
    requests = [forward_backward(model_id, seq_id) for seq_id in range(2, 20_000)]
    began = time.monotonic()
    taken = asyncio.run(submit_all(host, int(port), requests, began + SUBMITTED_S))
    return taken / (time.monotonic() - began)


def main() -> None:
    """Measure and print the lines."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with (
        tinsmith_server("--held-operation-s", "3600", *sys.argv[1:]) as url,
        httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": API_KEY}, timeout=60) as http,
    ):
        waited, alone, other = (RawModel(http, BASE_MODEL).model_id for _ in range(3))
        host, port = url.removeprefix("http://").split(":")
        requests = [forward_backward(waited, seq_id) for seq_id in range(2, POLLS + 2)]
        asyncio.run(submit_all(host, int(port), requests, time.monotonic() + 3600))
        without = submitted_per_s(url, alone)
        resting: dict[str, list[float]] = {}
        with probing(url, waited.partition(":")[0], resting):
            time.sleep(5)
        all_wait, stop = FORK.Event(), FORK.Event()
        poller = FORK.Process(target=poll_all, args=(url, waited, all_wait, stop))
        poller.start()
        all_wait.wait()
        times: dict[str, list[float]] = {}
        with probing(url, waited.partition(":")[0], times):
            time.sleep(PROBED_S)
        submitted = submitted_per_s(url, other)
        stop.set()
        poller.join()
    cuts, rest = (statistics.quantiles(each["heartbeat"], n=100) for each in (times, resting))
    load = os.getloadavg()[0]
    about = {"p50": cuts[49], "longest": max(times["heartbeat"]), "at_rest_p99": rest[98], "load": load}
    report(f"heartbeat_p99_ms_beside_{POLLS}_polls", cuts[98], "at most 50", **about)
    report(f"submits_per_s_beside_{POLLS}_polls", submitted, "at least 500", without=without, load=load)


if __name__ == "__main__":
    main()
