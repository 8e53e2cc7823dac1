"""Requests that a web page of another site could send are refused."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest

from tests.server.serving import served
from tinsmith.config import load

Kind = tuple[str, str, dict[str, str]]
"""Method, path and headers of a request."""

GET: Kind = ("GET", "livez", {})
POST: Kind = ("POST", "create_session", {"Content-Type": "application/json"})
BODY = b'{"tags": [], "sdk_version": "0.38.0", "type": "create_session"}'


def answer(directory: Path, headers: dict[str, str], allowed: tuple[str, ...] = (), kind: Kind = GET) -> httpx.Response:
    """What a server answers to a request with these headers."""
    method, path, own = kind

    async def run() -> httpx.Response:
        config = load(options={"base_models": ["tiny"], "allowed_hosts": list(allowed)})
        async with served(directory, config) as server:
            return await server.client.request(method, f"/api/v1/{path}", headers=own | headers, content=BODY if method == "POST" else None)

    return asyncio.run(run())


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.3.4", socket.gethostname()])
@pytest.mark.parametrize("kind", [GET, POST])
def test_own_names_and_any_address_are_served(tmp_path: Path, host: str, kind: Kind) -> None:
    assert answer(tmp_path, {"Host": host}, kind=kind).status_code == 200
    assert answer(tmp_path, {"Host": host, "Origin": f"http://{host}"}, kind=kind).status_code == 200  # a page of this server


@pytest.mark.parametrize("host", ["rebound.example", "localhost.example:8000", "127.0.0.1.example", "[::1", "a@b:c", ""])
@pytest.mark.parametrize("kind", [GET, POST])
def test_a_foreign_host_is_refused_before_anything_is_done(tmp_path: Path, host: str, kind: Kind) -> None:
    reply = answer(tmp_path, {"Host": host}, kind=kind)
    assert reply.status_code == 403
    assert f"Host {host!r} is not a name of this server" in reply.json()["detail"]
    assert "--allowed-host" in reply.json()["detail"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "http://127.0.0.1:8001", "localhost:8000", ""])
@pytest.mark.parametrize("kind", [GET, POST])
def test_a_foreign_origin_is_refused(tmp_path: Path, origin: str, kind: Kind) -> None:
    reply = answer(tmp_path, {"Host": "localhost:8000", "Origin": origin}, kind=kind)
    assert reply.status_code == 403
    assert f"Origin {origin!r} is not this server" in reply.json()["detail"]


def test_a_name_that_was_allowed_is_served_as_host_and_as_origin(tmp_path: Path) -> None:
    allowed = ("models.example",)
    assert answer(tmp_path, {"Host": "models.example"}, allowed).status_code == 200
    assert answer(tmp_path, {"Host": "Models.example:443", "Origin": "https://models.example"}, allowed).status_code == 200
    assert answer(tmp_path, {"Host": "other.example"}, allowed).status_code == 403


def test_a_body_that_does_not_say_its_type_is_refused(tmp_path: Path) -> None:
    """A page can send it to any server without asking first."""
    for headers in ({}, {"Content-Type": "text/plain"}):
        reply = answer(tmp_path, headers, kind=("POST", "create_session", {}))
        assert reply.status_code == 400
        assert "is not taken by /api/v1/create_session; send application/json" in reply.json()["detail"]
