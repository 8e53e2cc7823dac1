"""Limits on what a connection may send outside of bodies, on the real uvicorn protocol.

Invariant: Connections that send nothing, or a part of a request, are closed; those that wait for a reply stay open.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import uvicorn

from tests.server.serving import served
from tinsmith.config import Config, ServerConfig
from tinsmith.server import body
from tinsmith.server.body import LargeBodies
from tinsmith.server.http_protocol import BoundedHttp
from tinsmith.server.main import http_config

JSON = {"Content-Type": "application/json"}
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@contextlib.asynccontextmanager
async def listening(directory: Path, idle_s: float = 75.0) -> AsyncIterator[tuple[int, Connect]]:
    """A server without an engine on a socket: its port, and how to connect to it."""
    async with served(directory, Config(server=ServerConfig(connection_idle_s=idle_s))) as server:
        http = uvicorn.Server(http_config(server.hub))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        serving = asyncio.create_task(http.serve([listener]))
        yield port, lambda: asyncio.open_connection("127.0.0.1", port)
        http.should_exit = True
        await serving


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and detail of the reply that the connection ends with."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().split("content-length:")[1].split()[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(length))["detail"]


ENDLESS = {
    "header": b"GET /api/v1/healthz HTTP/1.1\r\nhost: a\r\nx: ",
    "headers": b"GET /api/v1/healthz HTTP/1.1\r\nhost: a\r\nx: a\r\nx: ",
    "request line": b"GET /",
    "trailer": b"POST /api/v1/telemetry HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: ",
    "chunk extension": b"POST /api/v1/telemetry HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2;",
}
"""Beginnings of requests, after which any number of letters could follow."""


@pytest.mark.parametrize(("begun", "more"), [("header", b"a"), ("request line", b"a"), ("headers", b"a\r\nx: ")])
async def test_an_endless_header_is_refused_with_the_limit(tmp_path: Path, begun: str, more: bytes) -> None:
    async with listening(tmp_path) as (port, connect):
        reader, writer = await connect()
        writer.write(ENDLESS[begun] + more * 2**20)  # its end never comes
        status, detail = await answer(reader)
        assert (status, detail) == (431, "the request's header is longer than 64 KiB (max_header_kib); send a shorter one")
        writer.close()
        async with httpx.AsyncClient() as client:
            assert (await client.post(f"http://127.0.0.1:{port}/api/v1/client/config", json={})).status_code == 200


@pytest.mark.parametrize("begun", ["trailer", "chunk extension"])
async def test_what_a_chunked_body_has_beside_its_data_is_limited_too(tmp_path: Path, begun: str) -> None:
    async with listening(tmp_path) as (_, connect):
        reader, writer = await connect()
        with contextlib.suppress(ConnectionError):  # it is closed while we send
            writer.write(ENDLESS[begun] + b"a" * 2**20)
            await writer.drain()
            assert await reader.read() == b""


POST = b"POST /api/v1/telemetry HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "replies"),
    [
        (b"", 0),
        (b"GET /api/v1/livez HTTP/1.1\r\nhost: loc", 0),
        (POST + b"content-length: 3\r\n\r\n{", 0),
        (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", 0),
        (POST + b"content-length: 2\r\n\r\n{}", 1),
        (POST + b"content-length: 2\r\n\r\n{}" + POST + b"content-length: 3\r\n\r\n{", 1),
    ],
    ids=["nothing", "half a header", "half a body", "a part of the chunks", "nothing after a reply", "half a second request"],
)
async def test_a_connection_that_owes_us_a_request_is_closed(tmp_path: Path, sent: bytes, replies: int) -> None:
    async with listening(tmp_path, idle_s=0.2) as (_, connect):
        reader, writer = await connect()
        writer.write(sent)
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == replies


async def test_a_header_that_comes_letter_by_letter_must_be_complete_in_that_time(tmp_path: Path) -> None:
    async with listening(tmp_path, idle_s=0.2) as (_, connect):
        reader, writer = await connect()
        closed = asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        while not closed.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):  # a letter was on its way
            assert closed.result() == b""


@pytest.mark.parametrize(("part", "every_s", "is_read"), [(1, 74.0, False), (64 * 1024, 74.0, False), (5 * 10_240, 10.0, True)])
async def test_a_body_must_come_at_some_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, every_s: float, is_read: bool
) -> None:
    """Over the time that a connection may be idle, so that a pause of an uplink does no harm."""
    loop, passed = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    async with listening(tmp_path) as (_, connect):
        reader, writer = await connect()
        writer.write(POST.replace(b"telemetry", b"asample") + b"content-length: %d\r\n\r\n" % (40 * part))
        with contextlib.suppress(ConnectionError):  # it is closed while we send
            for _ in range(40):
                writer.write(b"x" * part)
                await writer.drain()
                for _ in range(3):  # it is read before time goes on
                    await asyncio.sleep(0)
                passed += every_s
            assert b"HTTP/1.1 400" in await reader.readline() if is_read else not await reader.read()
        writer.close()


@pytest.mark.parametrize(("part", "count", "is_read"), [(1, 1024, True), (1, 20_000, False), (64, 2_000, True)])
async def test_a_body_in_very_many_very_small_chunks_is_not_read(
    tmp_path: Path, part: int, count: int, is_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight connections that sent nothing else made a heartbeat take ten times as long."""
    async with listening(tmp_path) as (_, connect):
        reader, writer = await connect()
        chunk = b"%x\r\n%b\r\n" % (part, b" " * part)
        with contextlib.suppress(ConnectionError):  # it is closed while we send
            writer.write(POST.replace(b"telemetry", b"asample") + b"transfer-encoding: chunked\r\n\r\n" + chunk * count + b"0\r\n\r\n")
            await writer.drain()
            assert b"HTTP/1.1 400" in await reader.readline() if is_read else not await reader.read()
        writer.close()
    assert ("a body in chunks of 1 bytes was not read" in caplog.text) == (not is_read)


async def test_a_body_that_is_refused_is_not_taken_for_a_shorter_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it comes at once, and what was read of it would be a body, too."""
    read, closed = list[bytes](), asyncio.Event()
    small, lost = body._small, BoundedHttp.connection_lost

    def noted(content: bytes, encoding: str) -> bytes | None:
        read.append(content)
        return small(content, encoding)

    def connection_lost(protocol: BoundedHttp, exc: Exception | None) -> None:
        lost(protocol, exc)
        closed.set()

    monkeypatch.setattr(body, "_small", noted)
    monkeypatch.setattr(BoundedHttp, "connection_lost", connection_lost)
    async with listening(tmp_path) as (_, connect):
        reader, writer = await connect()
        chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in b"{}" + b" " * 1198)
        writer.write(POST.replace(b"telemetry", b"asample") + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert not await reader.read()
        await closed.wait()
        await asyncio.sleep(0)  # what waited for the body goes on before the server ends
        writer.close()
    assert read == []


async def test_who_waits_for_our_reply_is_not_sent_away_and_neither_is_a_body_that_we_do_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_on, waited = asyncio.Event(), asyncio.Event()
    loop, looks = asyncio.get_running_loop(), list[float]()

    def look(protocol: BoundedHttp) -> None:
        looks.append(loop.time())
        if len(looks) == 10:
            waited.set()
        looked(protocol)

    looked = BoundedHttp._look
    monkeypatch.setattr(BoundedHttp, "_look", look)

    async def turn(_: LargeBodies) -> None:
        await read_on.wait()

    monkeypatch.setattr(LargeBodies, "_turn", turn)
    async with listening(tmp_path, idle_s=0.2) as (_, connect):
        reader, writer = await connect()
        path = POST.replace(b"telemetry", b"asample")
        writer.write(path + b"content-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        await waited.wait()
        read_on.set()
        assert (await answer(reader))[0] == 400
        writer.close()


async def test_headers_and_bodies_below_the_limits_are_read_as_they_come(tmp_path: Path) -> None:
    async with listening(tmp_path) as (port, _), httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1") as client:
        for _ in range(3):  # the count begins anew with each request of a connection
            reply = await client.post("telemetry", content=b"[" + b" " * 10**6 + b"]", headers=JSON | {"x": "a" * 40_000})
            assert reply.status_code == 200
        reply = await client.post("telemetry", content=_slowly(b"[" + b" " * 200_000 + b"]"), headers=JSON)
        assert reply.status_code == 200


async def _slowly(body: bytes) -> AsyncIterator[bytes]:
    """In chunks of one byte and of many."""
    for start in range(1000):
        yield body[start : start + 1]
    yield body[1000:]
