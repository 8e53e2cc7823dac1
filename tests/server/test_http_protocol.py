"""Limits on what a connection may send outside of bodies, on the real uvicorn protocol.

Invariant: Connections that send nothing, or a part of a request, are closed; those that wait for a reply stay open.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tests.server.serving import served
from tinsmith.config import ServerConfig
from tinsmith.errors import ConfigError
from tinsmith.server import body
from tinsmith.server.app import create_app, http_config
from tinsmith.server.body import LargeBodies
from tinsmith.server.http_protocol import BoundedHttp
from tinsmith.server.main import require_usable_tls

JSON = {"Content-Type": "application/json"}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
POST = b"POST /api/v1/telemetry HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
LARGE = POST.replace(b"telemetry", b"asample")


@contextlib.asynccontextmanager
async def listening(
    directory: Path, idle_s: float = 75.0
) -> AsyncIterator[tuple[int, Callable[[], Awaitable[Streams]]]]:
    """A server without an engine on a socket: its port, and how to connect to it."""
    async with served(directory, connection_idle_s=idle_s) as server:
        http = uvicorn.Server(http_config(create_app(server.front), server.hub.config.server))
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        await server.front.tenants.caller({})  # bodies are read once the keys are
        serving = asyncio.create_task(http.serve([listener]))
        yield port, lambda: asyncio.open_connection("127.0.0.1", port)
        http.should_exit = True
        await serving


@contextlib.asynccontextmanager
async def connected(directory: Path, idle_s: float = 75.0, may_break: bool = False) -> AsyncIterator[Streams]:
    """A connection to such a server, which may close it while we send if `may_break`."""
    async with listening(directory, idle_s) as (_, connect):
        reader, writer = await connect()
        with contextlib.suppress(*[ConnectionError] if may_break else []):
            yield reader, writer
        writer.close()


async def assert_read(reader: asyncio.StreamReader, is_read: bool) -> None:
    """A body was read, and found to be no sample; or the connection was closed without a word."""
    if is_read:
        assert b"HTTP/1.1 400" in await reader.readline()
    else:
        assert await reader.read() == b""


CHUNKED = b"POST /api/v1/telemetry HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begun", "more", "is_told"),
    [
        (b"GET /api/v1/healthz HTTP/1.1\r\nhost: a\r\nx: ", b"a", True),
        (b"GET /", b"a", True),
        (b"GET /api/v1/healthz HTTP/1.1\r\nhost: a\r\nx: a\r\nx: ", b"a\r\nx: ", True),
        (CHUNKED + b"2\r\n{}\r\n0\r\nx: ", b"a", False),
        (CHUNKED + b"2;", b"a", False),
    ],
    ids=["header", "request line", "headers", "trailer", "chunk extension"],
)
async def test_what_is_endless_is_refused_with_the_limit_or_closed(
    tmp_path: Path, begun: bytes, more: bytes, is_told: bool
) -> None:
    async with connected(tmp_path, may_break=not is_told) as (reader, writer):
        writer.write(begun + more * 2**20)  # its end never comes
        answer = await reader.read()
        reason = b"the request's header is longer than 64 KiB (max_header_kib); send a shorter one"
        assert (answer.startswith(b"HTTP/1.1 431 ") and reason in answer) if is_told else not answer


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
    ids=[
        "nothing",
        "half a header",
        "half a body",
        "a part of the chunks",
        "nothing after a reply",
        "half a second request",
    ],
)
async def test_a_connection_that_owes_us_a_request_is_closed(tmp_path: Path, sent: bytes, replies: int) -> None:
    async with connected(tmp_path, idle_s=0.2) as (reader, writer):
        writer.write(sent)
        assert (await reader.read()).count(b"HTTP/1.1 200 OK") == replies


async def test_a_header_that_comes_letter_by_letter_must_be_complete_in_that_time(tmp_path: Path) -> None:
    async with connected(tmp_path, idle_s=0.2, may_break=True) as (reader, writer):
        closed = asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\nx: ")
        while not closed.done():
            writer.write(b"a")
            await asyncio.sleep(0.01)
        assert closed.result() == b""


@pytest.mark.parametrize(
    ("part", "every_s", "is_read"), [(1, 74.0, False), (64 * 1024, 74.0, False), (5 * 10_240, 10.0, True)]
)
async def test_a_body_must_come_at_some_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, every_s: float, is_read: bool
) -> None:
    """Over the time that a connection may be idle, so that a pause of an uplink does no harm."""
    loop, passed = asyncio.get_running_loop(), 0.0
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed)
    async with connected(tmp_path, may_break=not is_read) as (reader, writer):
        writer.write(LARGE + b"content-length: %d\r\n\r\n" % (40 * part))
        for _ in range(40):
            writer.write(b"x" * part)
            await writer.drain()
            for _ in range(3):  # it is read before time goes on
                await asyncio.sleep(0)
            passed += every_s
        await assert_read(reader, is_read)


@pytest.mark.parametrize(("part", "count", "is_read"), [(1, 1024, True), (1, 20_000, False), (64, 2_000, True)])
async def test_a_body_in_very_many_very_small_chunks_is_not_read(
    tmp_path: Path, part: int, count: int, is_read: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight connections that sent nothing else made a heartbeat take ten times as long."""
    async with connected(tmp_path, may_break=not is_read) as (reader, writer):
        writer.write(
            LARGE + b"transfer-encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (part, b" " * part) * count + b"0\r\n\r\n"
        )
        await writer.drain()
        await assert_read(reader, is_read)
    assert ("a body in chunks of 1 bytes was not read" in caplog.text) == (not is_read)


async def test_a_body_that_is_refused_is_not_taken_for_a_shorter_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    async with connected(tmp_path) as (reader, writer):
        chunks = b"".join(b"1\r\n%c\r\n" % letter for letter in b"{}" + b" " * 1198)
        writer.write(LARGE + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert not await reader.read()
        await closed.wait()
        await asyncio.sleep(0)  # what waited for the body goes on before the server ends
    assert read == []


async def test_who_waits_for_our_reply_is_not_sent_away_and_neither_is_a_body_that_we_do_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_on, waited, looked = asyncio.Event(), asyncio.Event(), BoundedHttp._look
    looks = list[BoundedHttp]()

    def look(protocol: BoundedHttp) -> None:
        looks.append(protocol)
        if len(looks) == 10:
            waited.set()
        looked(protocol)

    async def turn(_: LargeBodies) -> None:
        await read_on.wait()

    monkeypatch.setattr(BoundedHttp, "_look", look)
    monkeypatch.setattr(LargeBodies, "_turn", turn)
    async with connected(tmp_path, idle_s=0.2) as (reader, writer):
        writer.write(LARGE + b"content-length: 1000000\r\n\r\n" + b"x" * 1_000_000)
        await waited.wait()
        read_on.set()
        assert b"HTTP/1.1 400" in await reader.readline()


async def test_headers_and_bodies_below_the_limits_are_read_as_they_come(tmp_path: Path) -> None:
    async def slowly(content: bytes) -> AsyncIterator[bytes]:
        """In chunks of one byte and of many."""
        for start in range(1000):
            yield content[start : start + 1]
        yield content[1000:]

    async with (
        listening(tmp_path) as (port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1") as client,
    ):
        long = b"[" + b" " * 10**6 + b"]"
        for content in (long, long, slowly(b"[" + b" " * 200_000 + b"]")):  # counted anew for each request
            reply = await client.post("telemetry", content=content, headers=JSON | {"x": "a" * 40_000})
            assert reply.status_code == 200


async def test_only_a_trusted_proxy_says_how_its_clients_reach_the_server(tmp_path: Path) -> None:
    async with served(tmp_path, trusted_proxies=["10.0.0.0/24"]) as server:
        server.save("tinker://m/external_weights/a")
        http = http_config(create_app(server.front), server.hub.config.server)
        http.load()
        found = {}
        for address in ("127.0.0.1", "10.0.0.9", "10.0.1.9"):
            transport = httpx.ASGITransport(http.loaded_app, client=(address, 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                path = "/api/v1/training_runs/m/checkpoints/external_weights/a/external_weights_urls"
                reply = await client.get(path, headers={"X-Forwarded-Proto": "https", "X-Forwarded-For": "1.2.3.4"})
                (url,) = reply.json()["urls"].values()
                found[address] = url.partition(":")[0]
        assert found == {"127.0.0.1": "https", "10.0.0.9": "https", "10.0.1.9": "http"}


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"trusted_proxies": ["proxy"]}, "trusted_proxies='proxy' does not appear to be an IPv4 or IPv6 network"),
        ({"tls_key": "key.pem"}, "tls_key=key.pem has no effect without --tls-cert"),
        ({"tls_cert": "none.pem"}, "tls_cert=none.pem, tls_key=none.pem cannot be used: .*No such file"),
    ],
)
def test_certificates_and_proxies_that_cannot_work_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        require_usable_tls(ServerConfig(**settings))
