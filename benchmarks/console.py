"""The console: its first page cold in a browser, pages of a full store, and open pages beside training.

    first_page       Chromium without a cache opens `/` of a server that has just become ready: until all is loaded
    page_...         each page of a store of 10,000 operations and 500 checkpoints, first and again
    step_watched     an SFT step (as of `observing`) while 1,000 streams of three pages are open, against none
    server_cores     cores that the server takes for these, whatever else the machine does

About 4 minutes. Run it with: taskset -c 0,1 python -m benchmarks.console
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from playwright.sync_api import Request, sync_playwright

from benchmarks.servers import random_datums, tinsmith_server, training_client
from benchmarks.sft_step import UNIFORM, VOCABULARY, sdk_step
from benchmarks.timing import report, seconds
from tests.running import serving
from tinsmith.models.tiny import write_tiny_model
from tinsmith.store import ids
from tinsmith.store.records import Checkpoint, Model, NewCommand, OperationMetrics, Outcome
from tinsmith.store.store import Store

CHROMIUM = "/usr/bin/chromium"
STEPS, CHECKPOINTS, RUNS = 5_000, 500, 100
STREAMS = 1_000
SHAPE = {"rank": 8, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": False}


def first_page(url: str) -> None:
    """Report how long the first page takes a browser without a cache, and how much it loads.

    The first of six is the first that the server ever shows.
    """
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        times, sent, decoded = [], list[int](), 0.0

        def note(request: Request) -> None:
            told = request.sizes()
            sent.append(told["responseBodySize"] + told["responseHeadersSize"])

        for _ in range(6):
            with browser.new_context() as context:  # which has a cache of its own
                page = context.new_page()
                sent.clear()
                page.on("requestfinished", note)
                page.goto(url, wait_until="load")
                times.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd / 1000"))
                decoded = page.evaluate(
                    "performance.getEntries().reduce((sum, entry) => sum + (entry.decodedBodySize || 0), 0) / 1000"
                )
        median = statistics.median(times)
        report("first_page_s", median, "less than 0.3", first=times[0], best=min(times))
        report("first_page_kb", decoded, "less than 250", sent_kb=sum(sent) / 1000, requests=len(sent))
        browser.close()


def fill(data_dir: Path) -> str:
    """Write a store of one long run with all checkpoints, and some short ones; returns the id of the long one."""
    with closing(Store.open(data_dir)) as store:
        session_id = str(uuid.uuid4())
        about: dict[str, Any] = {
            "tags": [],
            "user_metadata": None,
            "sdk_version": "0",
            "project_id": None,
            "display_name": None,
        }
        store.create_session(session_id, about)
        for number in range(RUNS):
            model = Model(ids.model_id(session_id, number), session_id, "tiny", SHAPE, {"type": "adamw"}, None)
            command = NewCommand(model.model_id, 0, "create_model", b"", model=model)
            store.append([command])
            store.record([Outcome(f"{model.model_id}/0", b"{}", "json", None, None)])
        long = ids.model_id(session_id, 0)
        for first in range(1, 2 * STEPS, 500):
            numbers = range(first, min(first + 500, 2 * STEPS + 1))
            store.append([_command(long, number) for number in numbers])
            store.record([_outcome(long, number) for number in numbers])
        for number in range(CHECKPOINTS):
            path = f"tinker://{long}/weights/step-{number}"
            place = f"made-up-{number}"
            store.announce_checkpoint(place)
            store.put_checkpoint(
                Checkpoint(
                    path,
                    long,
                    "training",
                    f"step-{number}",
                    place,
                    "tiny",
                    "qwen3",
                    SHAPE,
                    True,
                    2**20,
                    None,
                    time.time(),
                    None,
                )
            )
    return long


def _command(model_id: str, number: int) -> NewCommand:
    return NewCommand(model_id, number, "forward_backward" if number % 2 else "optim_step", b"x")


def _outcome(model_id: str, number: int) -> Outcome:
    request_id = f"{model_id}/{number}"
    if number % 2:
        measured = OperationMetrics("forward_backward", {"loss:sum": 1000 / number})
        return Outcome(request_id, b"x" * 2000, "protobuf", None, None, tokens=1024, gpu_seconds=0.1, measured=measured)
    if number % 100 == 0:
        return Outcome(request_id, None, None, "the step was refused " * 5, "user")
    measured = OperationMetrics("optim_step", {"grad_norm": 1 / number, "learning_rate": 1e-4})
    return Outcome(request_id, b"{}", "json", None, None, measured=measured)


def full_store() -> None:
    """Report how long each page takes."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model("qwen3", directory / "model")
        long = fill(directory / "data")
        with serving(directory, "--base-model", f"tiny={directory / 'model'}", "--kv-cache-gib", "0.1") as server:
            server.wait_for_health()
            pages = {
                "overview": "/",
                "runs": "/runs",
                "run": f"/runs/{long}",
                "curves": f"/curves.json?runs={long}&smooth=0.9",
                "batches": f"/runs/{long}/batches",
                "compared": f"/runs?compare={long},{long[:-1]}1",
                "operations": "/operations",
                "failed": "/operations?status=failed",
                "operation": f"/operations/{long}/77",
                "settings": "/settings",
            }
            with httpx.Client(base_url=server.url, timeout=60) as client:
                for name, path in pages.items():
                    sizes: list[int] = []
                    times = [seconds(lambda: sizes.append(_size(client, path))) for _ in range(6)]  # noqa: B023
                    again = statistics.median(times[1:])
                    report(f"page_{name}_s", max(times[0], again), "less than 0.3", again=again, kb=sizes[0] / 1000)


def _size(client: httpx.Client, path: str) -> int:
    return len(client.get(path).raise_for_status().content)


async def watch(url: str, count: int) -> None:
    """Open so many streams, and read them for ever; a line says when all are open."""
    place = urlsplit(url)

    async def follow(number: int) -> None:
        path = ("/live/", "/live/runs", "/live/operations")[number % 3]
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\nAccept: text/event-stream\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        opened.append(number)
        if len(opened) == count:
            print("open", flush=True)
        while await reader.read(2**16):
            pass

    opened: list[int] = []
    await asyncio.gather(*[follow(number) for number in range(count)])


@contextmanager
def watched(url: str) -> Iterator[None]:
    """While the body runs, another process has all streams open."""
    command = [sys.executable, "-m", "benchmarks.console", "watch", url, str(STREAMS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        time.sleep(2)
        yield
    finally:
        process.terminate()
        process.wait()


def beside_training() -> None:
    """Report a step with and without open pages, and the share of a core that the server takes for them."""
    data = random_datums(UNIFORM, VOCABULARY)
    with (
        tinsmith_server(hidden=512, layers=8, vocab=VOCABULARY) as url,
        training_client(url) as client,
    ):
        server = _listening_at(url)
        shares: dict[bool, list[float]] = {False: [], True: []}
        times: dict[bool, list[float]] = {False: [], True: []}

        def steps(is_watched: bool) -> None:
            before, began = sum(server.cpu_times()[:2]), time.monotonic()
            times[is_watched].append(seconds(lambda: sdk_step(client, data)))
            times[is_watched].append(seconds(lambda: sdk_step(client, data)))
            shares[is_watched].append((sum(server.cpu_times()[:2]) - before) / (time.monotonic() - began))

        sdk_step(client, data)
        for _ in range(5):
            steps(is_watched=False)
            with watched(url):
                steps(is_watched=True)
        alone_s, watched_s = (statistics.median(times[each]) for each in (False, True))
        report("step_watched", watched_s / alone_s, "at most 1.02", alone_s=alone_s, watched_s=watched_s)
        alone, shared = (statistics.median(shares[each]) for each in (False, True))
        report("server_cores", shared - alone, "at most 0.04", alone=alone, watched=shared)


def _listening_at(url: str) -> psutil.Process:
    """The process that answers at this address."""
    port = urlsplit(url).port
    found = [
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == "LISTEN" and each.laddr and each.laddr.port == port
    ]
    assert found[0] is not None
    return psutil.Process(found[0])


def main() -> None:
    """Measure all and print a line for each figure."""
    if sys.argv[1:2] == ["watch"]:
        return asyncio.run(watch(sys.argv[2], int(sys.argv[3])))
    with tinsmith_server() as url:
        first_page(url)
    full_store()
    beside_training()
    return None


if __name__ == "__main__":
    main()
