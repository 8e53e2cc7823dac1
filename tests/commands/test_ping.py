"""`tinsmith ping` names what keeps a client from a server; a proxy that is set keeps nobody from a server on this machine."""

import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.running import tinsmith_here
from tinsmith.commands.ping import ping
from tinsmith.commands.status import fetch_status
from tinsmith.errors import ConfigError
from tinsmith.http_client import keep_from_proxy
from tinsmith.rl.config import ServerSection
from tinsmith.rl.reach import require_server

NOBODY = "http://127.0.0.1:9"
"""Where no program listens: the port is set apart for one that none has any more."""
READY = {
    "/api/v1/healthz": (200, {"status": "ok"}),
    "/api/v1/get_server_capabilities": (200, {"supported_models": [{"model_name": "tiny"}, {"model_name": "org/big"}]}),
    "/api/v1/status": (200, {"engine": {}}),
}


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", *(f"{kind}_proxy" for kind in ("http", "https", "all", "no"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def answering(replies: Mapping[str, tuple[int, Any]], certificate: Path | None = None) -> Iterator[str]:
    """The URL of a server with these answers by path. With a certificate it speaks TLS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = replies.get(self.path, (404, {}))
            self.send_response(status)
            if status == 302:
                self.send_header("Location", content)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def refusal(url: str, key: str = "tml-x", base_model: str = "") -> str:
    with pytest.raises(ConfigError) as raised:
        ping(url, key, base_model)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "must begin with http:// or https://"),
        ("ftp://127.0.0.1", "must begin with http:// or https://"),
        ("http://", "and name a host"),
        ("http://a b", "must begin with http:// or https:// and name a host"),
        ("http://127.0.0.1:port", "is no URL: a port is a number"),
        ("http://[::1", "is no URL: a port is a number"),
        ("http://127.0.0.1:0", "no server listens on port 0"),
        ("http://127.0.0.1:8000/api/v1", "leave the path out, clients add /api/v1 to the URL by themselves: http://127.0.0.1:8000"),
        (NOBODY, "nothing listens on port 9 of 127.0.0.1: start the server (tinsmith serve --port 9), or correct the port"),
        ("http://no-such-host.invalid:8000", "the host 'no-such-host.invalid' has no address ("),
    ],
)
def test_what_is_wrong_with_a_url_is_named(url: str, said: str) -> None:
    assert said in refusal(url)


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ({}, "is no Tinker server: correct the port or the host (HTTP 404)"),
        ({"/api/v1/healthz": (200, [])}, "is no Tinker server"),
        ({"/api/v1/healthz": (302, "/elsewhere"), "/elsewhere": (200, {})}, "sends clients on to http://127.0.0.1:"),
        ({"/api/v1/healthz": (503, {"detail": "loading\ntiny"})}, r"is not ready: loading\ntiny; wait for it, or see the server's log"),
        ({"/api/v1/healthz": (502, {})}, "is no Tinker server: correct the port or the host (HTTP 502)"),
        ({"/api/v1/healthz": (403, {"detail": "Host 'x' is no name"})}, "refuses this client: Host 'x' is no name"),
        (READY | {"/api/v1/get_server_capabilities": (401, {})}, "refuses the API key (HTTP 401): set TINKER_API_KEY"),
        (READY | {"/api/v1/get_server_capabilities": (200, {})}, "does not list its base models ('supported_models')"),
    ],
)
def test_what_a_server_answers_is_named(replies: Mapping[str, tuple[int, Any]], said: str) -> None:
    with answering(replies) as url:
        assert said in refusal(url)


@pytest.mark.parametrize("key", ["tml-pw\r", "tml-pw\n", "tml-pw€"])
def test_a_key_that_no_header_can_carry_is_not_shown(key: str) -> None:
    with answering(READY) as url:
        assert refusal(url, key).startswith("the API key holds a character that no header can carry")
        assert "tml-pw" not in refusal(url, key)


@pytest.mark.parametrize(
    "url", ["http://u:pw@127.0.0.1:9", "http://u:pw@h:port", "http://u:p/pw@h", "u:pw@127.0.0.1:8000", "http://u:pw@h/x"]
)
def test_no_password_of_a_url_is_shown(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pw" not in refusal(url)
    for ask in (fetch_status, lambda url: require_server(ServerSection(url, "tml-x", wait_s=0))):
        with pytest.raises(ConfigError) as raised:
            ask(url)
        assert "pw" not in str(raised.value)
    for proxy in ("http://u:pw@127.0.0.1:9", "http://u:pw@127.0.0.1:port"):
        monkeypatch.setenv("http_proxy", proxy)
        assert "through the proxy http://127.0.0.1:" in refusal("http://example.invalid")
        assert "pw" not in refusal("http://example.invalid")
    with answering(READY) as there:
        assert "pw" not in refusal(there)
        with_user = there.replace("//", "//u:pw@")
        monkeypatch.delenv("http_proxy")
        assert ping(with_user, "tml-x", "").startswith(f"{there} is ready")
        assert fetch_status(with_user) == {"engine": {}}


def test_what_a_foreign_server_says_is_escaped() -> None:
    forged = {"/api/v1/healthz": (503, {"detail": "a\n\x1b[2Jb"}), "/api/v1/status": (200, {"engine": {"reason": "\x1b[2J"}})}
    with answering(forged) as url:
        assert fetch_status(url) == {"engine": {"reason": r"\x1b[2J"}}
        with pytest.raises(ConfigError, match=r"not ready \(a\\n\\x1b\[2Jb\)"):
            require_server(ServerSection(url, "tml-x", wait_s=0))


def test_a_server_that_can_be_used_is_described_with_what_scripts_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(READY) as url:
        assert refusal(url, base_model="huge").endswith("base model 'huge' is not served at " + url + "; there are: tiny, org/big")
        assert "must begin with tml-" in refusal(url, "sk-x")
        ready = f"{url} is ready and serves tiny, org/big"
        unnamed, keyless = (
            f"TINKER_BASE_URL does not name it, so scripts must: base_url={url!r}",
            "TINKER_API_KEY is not set, so scripts must give a key",
        )
        assert ping(url, "", "tiny:variant").startswith(f"{ready}; {unnamed}; {keyless}")
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-x")
        ran = tinsmith_here("ping")
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{ready}\n", "")
        ran = tinsmith_here("ping", NOBODY)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr.startswith("tinsmith: nothing listens on port 9 of 127.0.0.1: ")


def test_one_that_listens_and_never_answers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.commands.ping._PATIENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "does not answer within 0.1 s: it is very busy or hangs" in refusal(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_http_and_https_that_are_mistaken_for_each_other_are_named(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "2"]
    subprocess.run([*make, "-keyout", str(certificate), "-out", str(tmp_path / "public")], check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + (tmp_path / "public").read_text())
    with answering(READY, certificate) as url:
        host = url.removeprefix("https://")
        assert refusal(f"http://{host}") == f"{host} speaks TLS: write https://{host}"
        assert "the TLS certificate of 127.0.0.1 is not trusted (self-signed certificate)" in refusal(url)
    with answering(READY) as url:
        assert refusal(url.replace("http:", "https:")).endswith(f"speaks no TLS: write {url}")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_keeps_no_command_from_a_server_on_this_machine(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intranet")  # so that they are as they were when the test has ended
    monkeypatch.setenv(variable, NOBODY)
    with answering(READY) as url:
        assert fetch_status(url) == {"engine": {}}
        assert f"a proxy is set ({NOBODY}), to which the SDK would send what is for 127.0.0.1: export NO_PROXY=127.0.0.1" in refusal(url)
        require_server(ServerSection(url, "tml-x", wait_s=0))
        assert ping(url, "tml-x", "").startswith(f"{url} is ready")  # from now on the SDK goes there directly, in this process
        keep_from_proxy("http://example.org")
        for name in ("no_proxy", "NO_PROXY"):
            assert os.environ[name] == "intranet,127.0.0.1"
