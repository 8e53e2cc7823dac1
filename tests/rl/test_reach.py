"""What is missing to reach a server is said at once; the SDK alone would be silent for minutes."""

import json
import logging
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.running import tinsmith_here
from tinsmith.commands.ping import ping
from tinsmith.errors import ConfigError
from tinsmith.rl import reach
from tinsmith.rl.config import ModelSection, ServerSection
from tinsmith.rl.policy import connect, open_policy, open_training_client
from tinsmith.rl.reach import require_server

NO_URL = "url is empty and TINKER_BASE_URL is not set; give the server's URL, such as http://127.0.0.1:8000"
NO_KEY = "api_key is empty and TINKER_API_KEY is not set; Tinsmith takes any key that begins with tml-, such as tml-anything"
NOBODY = "http://127.0.0.1:9"
"""Where no program listens: the port is set apart for one that none has any more."""


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@contextmanager
def answering(replies: Sequence[tuple[int, bytes]]) -> Iterator[str]:
    """The URL of a server that gives these answers, the last one again and again."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status if self.path == "/api/v1/healthz" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def refused(url: str, key: str = "tml-test") -> str:
    """Why a server cannot be used, without waiting for it."""
    with pytest.raises(ConfigError) as raised:
        require_server(ServerSection(url, key, wait_s=0))
    return str(raised.value)


def test_what_is_not_given_is_named() -> None:
    assert refused("", "") == f"server: {NO_URL}; {NO_KEY}"
    assert refused(NOBODY, "") == f"server: {NO_KEY}"
    assert refused("") == f"server: {NO_URL}"
    assert refused("127.0.0.1:8000") == "server: url='127.0.0.1:8000' must begin with http:// or https://"


def remedy(url: str, reason: str) -> str:
    return f"server: url='{url}': {reason}; start the server, correct the URL, or wait longer with server: wait_s=0"


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(NOBODY) == remedy(NOBODY, "no answer ([Errno 111] Connection refused)")
    monkeypatch.setenv("TINKER_BASE_URL", f"{NOBODY}/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    assert refused("", "") == remedy(NOBODY, "no answer ([Errno 111] Connection refused)")


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://a b"])
def test_what_is_no_url_is_refused_without_waiting(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^server: url='{url}': .*; give a URL such as http://127.0.0.1:8000$"):
        require_server(ServerSection(url, "tml-test", wait_s=3600))


def test_what_speaks_no_http_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        assert "no answer (SSH-2.0-OpenSSH" in refused(f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_server_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert refused(url) == remedy(url, "no answer (timed out)")


def test_another_server_is_named() -> None:
    with answering([(404, b"")]) as url:
        assert refused(url) == f"server: url='{url}' answers 404 to /api/v1/healthz: there is no Tinker server"
    with answering([(200, b"")]) as url:
        assert refused(f"{url}/api/v1") == (
            f"server: url='{url}/api/v1' answers 404 to /api/v1/healthz: there is no Tinker server; leave out /api/v1, which clients add"
        )


def test_a_server_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reach, "_PAUSE_S", 0.01)
    loading = (503, json.dumps({"status": "unavailable", "detail": "loading tiny"}).encode())
    with answering([loading, loading, (502, b"<html>"), (401, b"")]) as url:
        require_server(ServerSection(url, "tml-test"))
        assert [record.getMessage() for record in caplog.records] == [
            f"waiting for {url}: not ready (loading tiny)",
            f"waiting for {url}: not ready (HTTP 502)",
        ]
    with answering([loading]) as url:
        assert refused(url) == remedy(url, "not ready (loading tiny)")


def test_a_real_server_is_reached_at_once_though_a_proxy_is_set(
    server_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tinsmith")
    require_server(ServerSection(server_url, "tml-test", wait_s=0))
    assert not caplog.records
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", NOBODY)  # where the SDK would look for this server, for minutes
    with connect(ServerSection(server_url, "tml-test")):
        assert ping(server_url, "tml-test", "tiny").startswith(f"{server_url} is ready and serves tiny, tiny-vl")
    with pytest.raises(ConfigError) as raised:
        connect(ServerSection(server_url, "anything"))
    assert str(raised.value) == "server: The api_key must start with the 'tml-' prefix"


def test_a_model_that_the_server_refuses_is_named_in_one_line(server_url: str) -> None:
    nowhere = "tinker://none/sampler_weights/x"
    with connect(ServerSection(server_url, "tml-test")) as service:
        with pytest.raises(ConfigError, match=r"^model: the server refuses: base_model 'nope' is not served here; there are: [^\n]*$"):
            open_policy(service, "", "nope")
        with pytest.raises(ConfigError, match=f"^model: the server refuses: {nowhere} does not exist"):
            open_policy(service, nowhere, "")
        with pytest.raises(ConfigError, match=r"^model: the server refuses: .*'nope' is not served here"):
            open_training_client(service, ModelSection(base_model="nope"), "")


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_the_commands_say_it(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {base_model: tiny}\nenv: {name: arithmetic}\n")
    ran = tinsmith_here(command, str(file))
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"tinsmith: server: {NO_URL}; {NO_KEY}\n")
    file.write_text(f"server: {{url: '{NOBODY}', api_key: tml-x, wait_s: 0}}\nmodel: {{base_model: tiny}}\nenv: {{name: arithmetic}}\n")
    ran = tinsmith_here(command, str(file))
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"tinsmith: {remedy(NOBODY, 'no answer ([Errno 111] Connection refused)')}\n"
