"""Limits on what a connection may send outside of bodies, on the real uvicorn protocol."""

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
from tinsmith.server.main import http_config

JSON = {"Content-Type": "application/json"}
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@contextlib.asynccontextmanager
async def listening(directory: Path) -> AsyncIterator[tuple[int, Connect]]:
    """A server without an engine on a socket: its port, and how to connect to it."""
    async with served(directory) as server:
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
