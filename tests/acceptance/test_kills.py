"""What dies in the middle: servers, engines and workers while they save, and clients while they send or wait.

Invariant: A checkpoint is complete or absent, whichever process is killed while it is written, and its save is done
again; clients that go away leave nothing behind.
"""

import asyncio
import json
import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.acceptance.bad_target import Target
from tests.acceptance.conftest import API_KEY, ready, without_sdk
from tests.acceptance.raw import GOOD, RawModel
from tests.acceptance.talking import RAW_STEP
from tests.extent import amount, slow
from tests.running import START_S, Server


@pytest.fixture(autouse=True)
def its_database(database: Callable[[Path], object], tmp_path: Path) -> None:
    """All here holds for both databases."""
    database(tmp_path / "data")


LARGE_RANK = 256
"""Its checkpoint has 13 MiB, so that there is a middle of writing it."""


def is_being_written(directory: Path) -> bool:
    return any(entry.name.startswith(".writing-") for entry in directory.iterdir())


def is_in_place(directory: Path) -> bool:
    """The files of a second checkpoint have their final name; its row may be there or not."""
    return sum(not entry.name.startswith(".") for entry in directory.iterdir()) > 1


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("worker", is_being_written),
        ("engine", is_in_place),
        ("server", is_being_written),
        # Each victim and each moment is above.
        *slow(("worker", is_in_place), ("engine", is_being_written), ("server", is_in_place)),
    ],
)
def test_a_save_that_is_cut_off_is_done_again(
    text_only: list[str], tmp_path: Path, victim: str, moment: Callable[[Path], bool]
) -> None:
    with ready(tmp_path, *text_only) as server, without_sdk(server) as http:
        model = RawModel(http, "text", rank=LARGE_RANK)
        model.forward_backward(1, GOOD)
        model.optim_step(2, RAW_STEP)
        whole = str(model.result(model.save(3, "whole"))["path"])
        expected, deadline = model.scores(4), time.monotonic() + START_S
        victims = {"worker": server.worker_pid(), "engine": server.engine_pid(), "server": server.pid}
        cut = model.save(5, "cut")
        while not moment(tmp_path / "data" / "checkpoints"):  # without a pause: it is over in milliseconds
            assert time.monotonic() < deadline
        os.kill(victims[victim], signal.SIGKILL)
        if victim == "server":
            server.start_again()
        server.wait_for_health()
        saved = str(model.result(cut)["path"])  # the model comes back, and is saved again unless it was
        assert saved == whole.replace("/whole", "/cut")
        listed = {checkpoint["tinker_path"] for checkpoint in http.get("checkpoints").json()["checkpoints"]}
        assert listed == {whole, saved}
        for path in sorted(listed):
            assert RawModel(http, "text", path=path).scores(1) == expected


def request_bytes(path: str, body: bytes, length: int | None = None) -> bytes:
    """A POST as it goes over the wire, of which not all may follow."""
    lines = [
        f"POST /api/v1/{path} HTTP/1.1",
        "Host: localhost",
        f"X-API-Key: {API_KEY}",
        "Content-Type: application/json",
    ]
    return "\r\n".join([*lines, f"Content-Length: {length or len(body)}", "", ""]).encode() + body


def test_clients_that_go_away_while_they_send_or_wait_leave_nothing_behind(server: Server) -> None:
    def open_files() -> int:
        """How many the server has open, connections among them."""
        return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))

    target, address = Target(server, "text"), urlsplit(server.url)
    before, files, tracebacks = target.scores(), open_files(), server.log.read_text().count("Traceback")
    held = target.model.optim_step(target.seq_id + 2, RAW_STEP)
    poll = request_bytes("retrieve_future", json.dumps({"request_id": held}).encode())
    half = request_bytes("asample", b'{"prompt": ' + b" " * 5000, length=10**6)
    for sent in [poll, half] * amount(50, 300):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(sent)
            time.sleep(0.002)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it resets it
    deadline = time.monotonic() + START_S
    while open_files() > files + 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert target.scores() == before
    assert "error" not in target.model.result(held)
    assert server.log.read_text().count("Traceback") == tracebacks


def test_polls_that_come_at_once_are_all_answered(server: Server) -> None:
    target, other = Target(server, "text"), Target(server, "text")
    poll = {"request_id": target.model.optim_step(2, RAW_STEP)}

    async def poll_all() -> set[int]:
        """Their statuses. When all are open, others are served, and what they wait for is done."""
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"{server.url}/api/v1/", timeout=START_S, limits=unlimited) as client:
            polls = [asyncio.create_task(client.post("retrieve_future", json=poll)) for _ in range(amount(400, 3000))]
            assert len((await asyncio.to_thread(other.scores))[0]) == 12
            assert await asyncio.to_thread(lambda: target.model.result(target.model.optim_step(1, RAW_STEP)))
            return {reply.status_code for reply in await asyncio.gather(*polls)}

    # On a busy machine some wait longer than the server holds a poll, and are told to ask again.
    assert asyncio.run(poll_all()) <= {200, 408}
