"""What is missing to reach a server is said at once; the SDK alone would be silent for minutes.

What is wrong with a URL or with what answers there: `tests/commands/test_ping.py`.
"""

import logging
from pathlib import Path

import pytest

from tests.answering import NOBODY, answering
from tests.running import tinsmith_here
from tinsmith.commands.ping import ping
from tinsmith_rl import reach
from tinsmith_rl.config import ModelSection, ServerSection
from tinsmith_rl.errors import ConfigError
from tinsmith_rl.policy import connect, open_policy, open_training_client
from tinsmith_rl.reach import require_server

NO_URL = "url is empty and TINKER_BASE_URL is not set; give the server's URL, such as http://127.0.0.1:8000"
NO_KEY = (
    "api_key is empty and TINKER_API_KEY is not set; Tinsmith takes any key that begins with tml-, such as tml-anything"
)
GONE = f"server: url='{NOBODY}': no answer ([Errno 111] Connection refused)"
REMEDY = "; start the server, correct the URL, or wait longer with server: wait_s=0"


@pytest.fixture(autouse=True)
def _nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def refused(url: str, key: str = "tml-test") -> str:
    """Why a server cannot be used, without waiting for it."""
    with pytest.raises(ConfigError) as raised:
        require_server(ServerSection(url, key, wait_s=0))
    return str(raised.value)


@pytest.mark.parametrize("command", ["rl", "eval"])
def test_what_is_not_given_or_not_there_is_named(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(NOBODY, "") == f"server: {NO_KEY}"
    assert refused("") == f"server: {NO_URL}"
    (tmp_path / "run.yaml").write_text("server: {wait_s: 0}\nmodel: {base_model: tiny}\nenv: {name: arithmetic}\n")
    ran = tinsmith_here(command, str(tmp_path / "run.yaml"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"tinsmith-rl: server: {NO_URL}; {NO_KEY}\n")
    monkeypatch.setenv("TINKER_BASE_URL", f"{NOBODY}/")
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    ran = tinsmith_here(command, str(tmp_path / "run.yaml"))
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"tinsmith-rl: {GONE}{REMEDY}\n")


def test_a_server_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(reach, "_PAUSE_S", 0.01)
    loading = (503, {"status": "unavailable", "detail": "loading tiny"})
    replies = [loading, loading, (502, "<html>"), (401, "")]
    with answering(lambda: replies.pop(0)) as url:
        require_server(ServerSection(url, "tml-test"))
    assert caplog.messages == [
        f"waiting for {url}: not ready (loading tiny)",
        f"waiting for {url}: not ready (HTTP 502)",
    ]
    with answering(lambda: loading) as url:
        assert refused(url) == f"server: url='{url}': not ready (loading tiny){REMEDY}"


def test_a_real_server_is_reached_at_once_though_a_proxy_is_set(
    server_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tinsmith_rl")
    require_server(ServerSection(server_url, "tml-test", wait_s=0))
    assert not caplog.records
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HTTP_PROXY", NOBODY)  # where the SDK would look for this server, for minutes
    with connect(ServerSection(server_url, "tml-test")):
        assert ping(server_url, "tml-test", "tiny").startswith(f"{server_url} is ready and serves tiny, tiny-vl")
    with pytest.raises(ConfigError, match=r"^server: The api_key must start with the 'tml-' prefix$"):
        connect(ServerSection(server_url, "anything"))


def test_a_model_that_the_server_refuses_is_named_in_one_line(server_url: str) -> None:
    nowhere = "tinker://none/sampler_weights/x"
    with connect(ServerSection(server_url, "tml-test")) as service:
        with pytest.raises(
            ConfigError, match=r"^model: the server refuses: base_model 'nope' is not served here; there are: [^\n]*$"
        ):
            open_policy(service, "", "nope")
        with pytest.raises(ConfigError, match=f"^model: the server refuses: {nowhere} does not exist"):
            open_policy(service, nowhere, "")
        with pytest.raises(ConfigError, match=r"^model: the server refuses: .*'nope' is not served here"):
            open_training_client(service, ModelSection(base_model="nope"), "")
