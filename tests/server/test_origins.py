"""Requests that a web page of another site could send are refused.

Invariant: A web page of another site, or a host name rebound to this server, reaches no route; a body must state its
type.
"""

import socket
from pathlib import Path

from tests.server.serving import Served, refused, served
from tinsmith.config import load

BODY = b'{"tags": [], "sdk_version": "0.38.0", "type": "create_session"}'


async def reasons(server: Served, **headers: str) -> list[str]:
    """Why a GET and a POST with these headers are refused; "" for what is served."""
    get = await server.client.get("/api/v1/livez", headers=headers)
    typed = {"Content-Type": "application/json"} | headers
    post = await server.client.post("/api/v1/create_session", headers=typed, content=BODY)
    return ["" if reply.status_code == 200 else refused(reply, 403) for reply in (get, post)]


async def test_own_names_and_any_address_are_served(server: Served) -> None:
    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.3.4", socket.gethostname()):
        assert (
            await reasons(server, Host=host) == await reasons(server, Host=host, Origin=f"http://{host}") == ["", ""]
        ), host


async def test_a_foreign_host_or_origin_is_refused_before_anything_is_done(server: Served) -> None:
    for host in ("rebound.example", "localhost.example:8000", "127.0.0.1.example", "[::1", "a@b:c", ""):
        for reason in await reasons(server, Host=host):
            assert f"Host {host!r} is not a name of this server" in reason
            assert "--allowed-host" in reason
    for origin in (
        "http://evil.example",
        "null",
        "http://localhost:3000",
        "http://127.0.0.1:8001",
        "localhost:8000",
        "",
    ):
        for reason in await reasons(server, Host="localhost:8000", Origin=origin):
            assert f"Origin {origin!r} is not this server" in reason
    assert await server.shown("sessions") == {"sessions": []}


async def test_a_name_that_was_allowed_is_served_as_host_and_as_origin(tmp_path: Path) -> None:
    async with served(tmp_path, load(options={"base_models": ["tiny"], "allowed_hosts": ["models.example"]})) as server:
        assert await reasons(server, Host="models.example") == ["", ""]
        assert await reasons(server, Host="Models.example:443", Origin="https://models.example") == ["", ""]
        assert all(await reasons(server, Host="other.example"))


async def test_a_body_that_does_not_say_its_type_is_refused(server: Served) -> None:
    """A page can send it to any server without asking first."""
    for headers in ({}, {"Content-Type": "text/plain"}):
        reply = await server.client.post("/api/v1/create_session", headers=headers, content=BODY)
        assert "is not taken by /api/v1/create_session; send application/json" in refused(reply)
