"""Requests that a web page of another site could send are refused.

Invariant: A web page of another site, or a host name rebound to this server, reaches no route; a body must state its type.
"""

import socket
from pathlib import Path

import httpx

from tests.server.serving import Served, served
from tinsmith.config import load

BODY = b'{"tags": [], "sdk_version": "0.38.0", "type": "create_session"}'


async def answers(server: Served, **headers: str) -> list[httpx.Response]:
    """What it answers to a GET and a POST with these headers."""
    json_type = {"Content-Type": "application/json"}
    return [
        await server.client.get("/api/v1/livez", headers=headers),
        await server.client.post("/api/v1/create_session", headers=json_type | headers, content=BODY),
    ]


async def statuses(server: Served, **headers: str) -> list[int]:
    return [reply.status_code for reply in await answers(server, **headers)]


async def test_own_names_and_any_address_are_served(server: Served) -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.3.4", socket.gethostname()):
        assert await statuses(server, Host=host) == [200, 200], host
        assert await statuses(server, Host=host, Origin=f"http://{host}") == [200, 200], host  # a page of this server


async def test_a_foreign_host_is_refused_before_anything_is_done(server: Served) -> None:
    for host in ("rebound.example", "localhost.example:8000", "127.0.0.1.example", "[::1", "a@b:c", ""):
        for reply in await answers(server, Host=host):
            assert reply.status_code == 403
            assert f"Host {host!r} is not a name of this server" in reply.json()["detail"]
            assert "--allowed-host" in reply.json()["detail"]
    assert (await server.client.get("/api/v1/sessions")).json() == {"sessions": []}


async def test_a_foreign_origin_is_refused(server: Served) -> None:
    for origin in ("http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:8001", "localhost:8000", ""):
        for reply in await answers(server, Host="localhost:8000", Origin=origin):
            assert reply.status_code == 403
            assert f"Origin {origin!r} is not this server" in reply.json()["detail"]


async def test_a_name_that_was_allowed_is_served_as_host_and_as_origin(tmp_path: Path) -> None:
    async with served(tmp_path, load(options={"base_models": ["tiny"], "allowed_hosts": ["models.example"]})) as server:
        assert await statuses(server, Host="models.example") == [200, 200]
        assert await statuses(server, Host="Models.example:443", Origin="https://models.example") == [200, 200]
        assert await statuses(server, Host="other.example") == [403, 403]


async def test_a_body_that_does_not_say_its_type_is_refused(server: Served) -> None:
    """A page can send it to any server without asking first."""
    for headers in ({}, {"Content-Type": "text/plain"}):
        reply = await server.client.post("/api/v1/create_session", headers=headers, content=BODY)
        assert reply.status_code == 400
        assert "is not taken by /api/v1/create_session; send application/json" in reply.json()["detail"]
