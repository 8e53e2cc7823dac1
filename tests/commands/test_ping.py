"""`tinsmith ping` names what keeps a client from a server; a proxy that is set keeps nobody from a server on this
machine.

So do `tinsmith status`, and the RL client before it begins.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.answering import NOBODY, Reply, answering, saying
from tests.running import START_S, tinsmith_here
from tinsmith.commands.ping import ping
from tinsmith.commands.status import fetch_status
from tinsmith.errors import ConfigError
from tinsmith.http_client import keep_from_proxy
from tinsmith_rl.config import ServerSection
from tinsmith_rl.errors import RlError
from tinsmith_rl.reach import require_server

HEALTH, MODELS = "/api/v1/healthz", "/api/v1/get_server_capabilities"
READY: dict[str, Reply] = {
    HEALTH: (200, {"status": "ok"}),
    MODELS: (200, {"supported_models": [{"model_name": "tiny"}, {"model_name": "org/big"}]}),
    "/api/v1/status": (200, {"engine": {}}),
}
SILENT, SSH = b"", b"SSH-2.0-OpenSSH\r\n\r\n"


PATIENCE = ("tinsmith.commands.ping._PATIENCE_S", "tinsmith.commands.status.TIMEOUT_S", "tinsmith_rl.reach._TIMEOUT_S")


@pytest.fixture(autouse=True)
def _nothing_set_and_much_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in PATIENCE:
        monkeypatch.setattr(patience, START_S)
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", *(f"{kind}_proxy" for kind in ("http", "https", "all", "no"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def refusal(url: str, key: str = "tml-x", base_model: str = "") -> str:
    with pytest.raises(ConfigError) as raised:
        ping(url, key, base_model)
    assert len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def refusals(url: str) -> list[str]:
    """Of ping, of status and of the RL client."""
    said = [refusal(url)]
    for ask in (lambda: fetch_status(url), lambda: require_server(ServerSection(url, "tml-x", wait_s=0))):
        with pytest.raises((ConfigError, RlError)) as raised:
            ask()
        said.append(str(raised.value))
    return said


SCHEME, NO_URL, NO_SERVER = (
    "must begin with http:// or https://",
    "is no URL: a port is a number",
    "no Tinsmith server answers at ",
)
NO_TINKER, SUCH_AS = "is no Tinker server: correct the port or the host", "; give a URL such as http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("url", "of_ping", "of_status", "of_rl"),
    [
        ("127.0.0.1:8000", SCHEME, SCHEME, SCHEME),
        ("http://", "and name a host", NO_SERVER, ""),
        ("http://a b", f"{SCHEME} and name a host", NO_SERVER, SUCH_AS),
        ("http://127.0.0.1:port", NO_URL, NO_SERVER, SUCH_AS),
        ("http://127.0.0.1:0", "no server listens on port 0", NO_SERVER, ""),
        (
            NOBODY,
            "nothing listens on port 9 of 127.0.0.1: start the server (tinsmith serve --port 9)",
            NO_SERVER,
            "Connection refused",
        ),
        (
            "http://no-such-host.invalid:8000",
            "the host 'no-such-host.invalid' has no address (",
            NO_SERVER,
            "no answer (",
        ),
    ],
)
def test_what_is_wrong_with_a_url_is_named(url: str, of_ping: str, of_status: str, of_rl: str) -> None:
    assert [said in told for said, told in zip((of_ping, of_status, of_rl), refusals(url), strict=True)] == [True] * 3


@pytest.mark.parametrize(
    ("replies", "of_ping", "of_status", "of_rl"),
    [
        (
            {},
            f"{NO_TINKER} (HTTP 404)",
            "answers 404: is it a Tinsmith server?",
            f"answers 404 to {HEALTH}: there is no Tinker server",
        ),
        (SSH, NO_TINKER, NO_SERVER, "no answer (SSH-2.0-OpenSSH"),
        (SILENT, "does not answer within 0.1 s: it is very busy or hangs", NO_SERVER, "no answer (timed out)"),
        (
            {HEALTH: (503, {"detail": "a\n\x1b[2Jb"})},
            r"is not ready: a\n\x1b[2Jb; wait for it",
            "answers 404",
            r"not ready (a\n\x1b[2Jb)",
        ),
    ],
)
def test_what_a_wrong_server_answers_is_named(
    replies: Mapping[str, Reply] | bytes, of_ping: str, of_status: str, of_rl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience in PATIENCE if replies == SILENT else ():
        monkeypatch.setattr(patience, 0.1)
    with saying(replies) if isinstance(replies, bytes) else answering(replies) as url:
        assert [said in told for said, told in zip((of_ping, of_status, of_rl), refusals(url), strict=True)] == [
            True
        ] * 3


def test_a_url_with_the_path_of_the_api_is_told_to_leave_it_out() -> None:
    with answering({}) as url:
        of_ping, of_status, of_rl = refusals(f"{url}/api/v1")
    assert "leave the path out, clients add /api/v1 to the URL by themselves: http://127.0.0.1:" in of_ping
    assert of_status.endswith("/api/v1 answers 404: is it a Tinsmith server? Leave out /api/v1")
    assert of_rl.endswith(
        "answers 404 to /api/v1/healthz: there is no Tinker server; leave out /api/v1, which clients add"
    )


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        ({HEALTH: (200, [])}, NO_TINKER),
        ({HEALTH: (302, "/elsewhere"), "/elsewhere": (200, {})}, "sends clients on to http://127.0.0.1:"),
        ({HEALTH: (403, {"detail": "Host 'x' is no name"})}, "refuses this client: Host 'x' is no name"),
        (READY | {MODELS: (401, {})}, "refuses the API key (HTTP 401): set TINKER_API_KEY"),
        (READY | {MODELS: (200, {})}, "does not list its base models ('supported_models')"),
    ],
)
def test_what_only_ping_asks_is_named(replies: Mapping[str, Reply], said: str) -> None:
    with answering(replies) as url:
        assert said in refusal(url)


def test_no_key_and_no_password_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (
        "http://u:pw@127.0.0.1:9",
        "http://u:pw@h:port",
        "http://u:p/pw@h",
        "u:pw@127.0.0.1:8000",
        "http://u:pw@h/x",
    ):
        assert not any("pw" in told for told in refusals(url))
    with answering(READY) as there:
        for key in ("tml-pw\n", "tml-pw€"):
            assert refusal(there, key).startswith("the API key holds a character that no header can carry")
            assert "tml-pw" not in refusal(there, key)
        with_user = there.replace("//", "//u:pw@")
        assert ping(with_user, "tml-x", "").startswith(f"{there} is ready")
        assert fetch_status(with_user) == {"engine": {}}
        for proxy in ("http://u:pw@127.0.0.1:9", "http://u:pw@127.0.0.1:port"):
            monkeypatch.setenv("http_proxy", proxy)
            assert "through the proxy http://127.0.0.1:" in refusal("http://example.invalid")
            assert "pw" not in refusal("http://example.invalid") + refusal(there)


def test_a_server_that_can_be_used_is_described_with_what_scripts_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(READY) as url:
        assert refusal(url, base_model="huge").endswith(
            f"base model 'huge' is not served at {url}; there are: tiny, org/big"
        )
        assert "must begin with tml-" in refusal(url, "sk-x")
        ready = f"{url} is ready and serves tiny, org/big"
        unnamed = f"TINKER_BASE_URL does not name it, so scripts must: base_url={url!r}"
        assert ping(url, "", "tiny:variant").startswith(
            f"{ready}; {unnamed}; TINKER_API_KEY is not set, so scripts must give a key"
        )
        monkeypatch.setenv("TINKER_BASE_URL", url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-x")
        ran = tinsmith_here("ping")
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{ready}\n", "")
    ran = tinsmith_here("ping", NOBODY)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("tinsmith: nothing listens on port 9 of 127.0.0.1: ")


def test_http_and_https_that_are_mistaken_for_each_other_are_named(tmp_path: Path) -> None:
    certificate = tmp_path / "certificate.pem"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=x",
        "-days",
        "2",
    ]
    subprocess.run(
        [*make, "-keyout", str(certificate), "-out", str(tmp_path / "public")], check=True, capture_output=True
    )
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
        assert (
            f"a proxy is set ({NOBODY}), to which the SDK would send what is for 127.0.0.1: export NO_PROXY=127.0.0.1"
            in refusal(url)
        )
        require_server(ServerSection(url, "tml-x", wait_s=0))
        # From now on the SDK goes there directly, in this process
        assert ping(url, "tml-x", "").startswith(f"{url} is ready")
        keep_from_proxy("http://example.org")
        assert [os.environ[name] for name in ("no_proxy", "NO_PROXY")] == ["intranet,127.0.0.1"] * 2
