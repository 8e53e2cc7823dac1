"""What dies in the middle: servers, engines and workers while they save, clients while they send or wait; and disks without room.

Invariant: A checkpoint is complete or absent, whichever process is killed while it is written; clients that go away leave nothing behind.
"""

import asyncio
import json
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.acceptance.bad_target import GOOD, Target
from tests.acceptance.conftest import API_KEY
from tests.acceptance.raw import RawModel
from tests.acceptance.talking import RAW_STEP, logprobs
from tests.extent import amount, slow
from tests.running import START_S, Server, serving

LARGE_RANK = 256
"""Its checkpoint has 13 MiB, so that there is a middle of writing it."""


@contextmanager
def client_of(server: Server) -> Iterator[httpx.Client]:
    """A client with a key."""
    with server.client() as http:
        http.headers["X-API-Key"] = API_KEY
        yield http


def scores(model: RawModel, seq_id: int) -> list[float]:
    """Log-probabilities of a good datum."""
    found: list[float] = logprobs(model.output(model.forward_backward(seq_id, GOOD, forward_only=True)))[0].tolist()
    return found


def trained(http: httpx.Client) -> RawModel:
    """A large model after one step, saved as `whole`."""
    model = RawModel(http, "text", rank=LARGE_RANK)
    model.forward_backward(1, GOOD)
    model.optim_step(2, RAW_STEP)
    assert model.result(model.save(3, "whole"))["path"] == f"tinker://{model.model_id}/weights/whole"
    return model


def is_being_written(directory: Path) -> bool:
    """The files of a checkpoint are there under a temporary name."""
    return any(entry.name.startswith(".writing-") for entry in directory.iterdir())


def is_in_place(directory: Path) -> bool:
    """The files of a second checkpoint have their final name; its row may be there or not."""
    return sum(not entry.name.startswith(".") for entry in directory.iterdir()) > 1


def wait_until(seen: Callable[[Path], bool], directory: Path) -> None:
    """Look without a pause: what is waited for is over in milliseconds."""
    deadline = time.monotonic() + START_S
    while not seen(directory):
        assert time.monotonic() < deadline


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
def test_a_save_that_is_cut_off_leaves_a_whole_checkpoint_or_none(
    text_only: list[str], tmp_path: Path, victim: str, moment: Callable[[Path], bool]
) -> None:
    with serving(tmp_path, *text_only) as server:
        server.wait_for_health()
        with client_of(server) as http:
            model = trained(http)
            expected = scores(model, 4)
            pids = {"worker": server.worker_pid(), "engine": server.engine_pid(), "server": server.pid}
            cut = model.save(5, "cut")
            wait_until(moment, tmp_path / "data" / "checkpoints")
            os.kill(pids[victim], signal.SIGKILL)
        if victim == "worker":  # the model comes back, and is saved again
            with client_of(server) as http:
                model.http = http
                again = RawModel(http, "text", path=str(model.result(cut)["path"]))
                assert scores(again, 1) == expected
        if victim == "engine":
            server.wait_for_health(503)
            assert_whole_or_absent(server, model.model_id, cut, expected)
    if victim == "server":
        with serving(tmp_path, *text_only) as server:
            assert_whole_or_absent(server, model.model_id, cut, expected)


def assert_whole_or_absent(server: Server, model_id: str, cut: str, expected: list[float]) -> None:
    """What is listed can be gone on from, and what is not does not exist; the save of the latter failed."""
    server.wait_for_health()
    with client_of(server) as http:
        listed = {checkpoint["tinker_path"] for checkpoint in http.get("checkpoints").json()["checkpoints"]}
        whole, other = (f"tinker://{model_id}/weights/{name}" for name in ("whole", "cut"))
        assert {whole} <= listed <= {whole, other}
        for path in sorted(listed):
            assert scores(RawModel(http, "text", path=path), 1) == expected
        if other not in listed:
            assert http.post("weights_info", json={"tinker_path": other}).status_code == 404
            assert http.post("retrieve_future", json={"request_id": cut}).json()["category"] == "server"


def test_a_disk_without_room_fails_the_save_and_nothing_else(text_only: list[str], tmp_path: Path) -> None:
    with serving(tmp_path, *text_only) as server:
        server.wait_for_health()
        with client_of(server) as http:
            model = trained(http)
            expected, worker = scores(model, 4), server.worker_pid()
            _, hard = resource.prlimit(worker, resource.RLIMIT_FSIZE)
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (6 * 2**20, hard))
            failed = model.result(model.save(5, "none"))
            assert failed["category"] == "server"
            assert "could not be written" in str(failed["error"])
            resource.prlimit(worker, resource.RLIMIT_FSIZE, (hard, hard))
            assert scores(model, 6) == expected
            saved = model.result(model.save(7, "none"))
            assert scores(RawModel(http, "text", path=str(saved["path"])), 1) == expected
            assert [entry.name for entry in (tmp_path / "data" / "checkpoints").iterdir() if entry.name.startswith(".")] == []


def request_bytes(path: str, body: bytes, length: int | None = None) -> bytes:
    """A POST as it goes over the wire, of which not all may follow."""
    lines = [f"POST /api/v1/{path} HTTP/1.1", "Host: localhost", f"X-API-Key: {API_KEY}", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length or len(body)}", "", ""]).encode() + body


def hang_up(server: Server, sent: bytes) -> None:
    """Send this and reset the connection."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(sent)
        time.sleep(0.002)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def open_files(server: Server) -> int:
    """How many the server has open, connections among them."""
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def test_clients_that_go_away_while_they_send_or_wait_leave_nothing_behind(server: Server) -> None:
    target = Target(server, "text")
    before, files = target.scores(), open_files(server)
    held = target.model.optim_step(target.seq_id + 2, RAW_STEP)
    poll = request_bytes("retrieve_future", json.dumps({"request_id": held}).encode())
    half = request_bytes("asample", b'{"prompt": ' + b" " * 5000, length=10**6)
    for _ in range(300):
        hang_up(server, poll)
        hang_up(server, half)
    deadline = time.monotonic() + START_S
    while open_files(server) > files + 5:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert target.scores() == before
    assert "error" not in target.model.result(held)
    assert "Traceback" not in server.log.read_text()


async def poll_all(server: Server, request_id: str, count: int, meanwhile: Callable[[], None]) -> list[bytes]:
    """So many polls at once; `meanwhile` runs in a thread when all are open. Returns the status lines."""
    address = urlsplit(server.url)
    sent = request_bytes("retrieve_future", json.dumps({"request_id": request_id}).encode())
    places = asyncio.Semaphore(500)

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with places:
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write(sent)
            await writer.drain()
            return reader, writer

    connections = await asyncio.gather(*[connect() for _ in range(count)])
    await asyncio.to_thread(meanwhile)
    lines = await asyncio.gather(*[reader.readline() for reader, _ in connections])
    for _, writer in connections:
        writer.close()
    return lines


def test_polls_that_come_at_once_are_all_answered(server: Server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    target = Target(server, "text")
    held = target.model.optim_step(2, RAW_STEP)

    def meanwhile() -> None:
        other = Target(server, "text")
        assert len(other.scores()) == 12
        assert target.model.result(target.model.optim_step(1, RAW_STEP))

    try:
        lines = asyncio.run(poll_all(server, held, min(amount(500, 5000), hard - 500), meanwhile))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    # On a busy machine some wait longer than the server holds a poll, and are told to ask again.
    assert set(lines) <= {b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 408 Request Timeout\r\n"}
