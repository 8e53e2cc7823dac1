"""The console: its first page cold in a browser, pages of a full store, and open pages beside training.

    first_page       Chromium without a cache opens `/` of a server that has just become ready: until all is loaded
    page_...         each page of a store of 10,000 operations and 500 checkpoints, first and again
    step_watched     an SFT step (as of `sft_step`) while 1,000 streams of three pages are open, against none
    server_cores     cores that the server takes for these, whatever else the machine does

About 9 minutes. Run it with: taskset -c 0,1 python -m benchmarks.console. Names of parts behind it run those only:
first_page, full_store, beside_training.
"""

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import closing
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
PAIRS = 6
STRETCH_S = 20.0
"""Seconds of steps with streams or without: with 1,000, a page is made again every 20."""
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
    """Open so many streams for each line `open` that is read, and close them for each `close`; say when it is done."""
    place = urlsplit(url)

    async def opened(number: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = ("/live/", "/live/runs", "/live/operations")[number % 3]
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\nAccept: text/event-stream\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.read(1)  # the first part of the page
        return reader, writer

    async def read(reader: asyncio.StreamReader) -> None:
        while await reader.read(2**16):
            pass

    streams = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
    reading = set[asyncio.Task[None]]()
    while order := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if order == "open":
            streams = await asyncio.gather(*[opened(number) for number in range(count)])
            reading = {asyncio.create_task(read(reader)) for reader, _ in streams}
        else:
            for _, writer in streams:
                writer.close()
            await asyncio.gather(*reading, return_exceptions=True)
            streams, reading = [], set()
        print("done", flush=True)


class Watchers:
    """Another process that has all streams open, or none."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-m", "benchmarks.console", "watch", url, str(STREAMS)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._told = "close"

    def tell(self, order: str) -> None:
        """`open` or `close` all streams, unless they are; returns when each has its page, and the server has settled.

        A stream out of 1,000 gets its page within 20 s.
        """
        if order == self._told:
            return
        self._told = order
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(order, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"
        time.sleep(2)


def beside_training() -> None:
    """Report a step with open pages against one without, and the share of a core that the server takes for them.

    Both take turns, each the first in every second pair; the figure is the median of the pairs.
    """
    data = random_datums(UNIFORM, VOCABULARY)
    with (
        tinsmith_server(hidden=512, layers=8, vocab=VOCABULARY) as url,
        training_client(url) as client,
    ):
        server, watchers = _listening_at(url), Watchers(url)

        def stretch(is_watched: bool) -> tuple[float, float]:
            """Seconds of a step, and cores of the server."""
            watchers.tell("open" if is_watched else "close")
            before, began, steps = sum(server.cpu_times()[:2]), time.monotonic(), 0
            while (elapsed := time.monotonic() - began) < STRETCH_S:
                sdk_step(client, data)
                steps += 1
            return elapsed / steps, (sum(server.cpu_times()[:2]) - before) / elapsed

        try:
            for order in ("open", "close"):
                watchers.tell(order)
                sdk_step(client, data)
            pairs = []
            for number in range(PAIRS):
                found = {is_watched: stretch(is_watched) for is_watched in ((True, False), (False, True))[number % 2]}
                pairs.append((found[True], found[False]))
            ratios = [watched[0] / alone[0] for watched, alone in pairs]
            shares = [watched[1] - alone[1] for watched, alone in pairs]
            alone_s = statistics.median(alone[0] for _, alone in pairs)
            median, low, high = statistics.median(ratios), min(ratios), max(ratios)
            report("step_watched", median, "at most 1.02", lowest=low, highest=high, alone_s=alone_s)
            report("server_cores", statistics.median(shares), "at most 0.04", highest=max(shares))
        finally:
            watchers.process.kill()
            watchers.process.wait()


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


def first_pages() -> None:
    """Start a server, and report its first page."""
    with tinsmith_server() as url:
        first_page(url)


PARTS = {"first_page": first_pages, "full_store": full_store, "beside_training": beside_training}


def main() -> None:
    """Measure all, or the parts that are named, and print a line for each figure."""
    if sys.argv[1:2] == ["watch"]:
        return asyncio.run(watch(sys.argv[2], int(sys.argv[3])))
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    return None


if __name__ == "__main__":
    main()
