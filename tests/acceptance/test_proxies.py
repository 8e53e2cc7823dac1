"""nginx and Caddy in front of a server, with the configurations of `docs/how-to/team.md`: only places are put in."""

import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.acceptance.conftest import ready
from tests.acceptance.raw import RawModel
from tests.acceptance.talking import RAW_STEP, datum, text_input
from tests.acceptance.test_keys import add_key, certificate
from tests.running import START_S, Server

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "team.md"
CERTIFICATE = "/etc/ssl/tinsmith"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
POLL_S = 1.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def own_address() -> str:
    """An address of this machine that is no loopback address, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def configuration(program: str, directory: Path, upstream: str, port: int) -> str:
    """That of the page, with these places instead of its own."""
    found = re.search(rf"```{program}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    text = found[1].replace("127.0.0.1:8000", upstream).replace(CERTIFICATE, str(directory / "tls"))
    if program == "caddy":
        return "{\n\tadmin off\n}\n" + text.replace("tinsmith.example.com", f"https://127.0.0.1:{port}")
    paths = "".join(f"{name}_temp_path {directory / name};\n" for name in TEMPORARY)
    text = text.replace("listen 443", f"listen 127.0.0.1:{port}").replace(
        "http {", f"http {{\naccess_log off;\n{paths}"
    )
    return f"daemon off;\npid {directory / 'pid'};\nerror_log {directory / 'error.log'};\n{text}"


@contextmanager
def proxied(program: str, directory: Path, upstream: str) -> Iterator[str]:
    """The URL of a proxy in front of the server at `upstream`, a host and a port."""
    port, file = free_port(), directory / "proxy.conf"
    file.write_text(configuration(program, directory, upstream, port))
    arguments = ["-c", str(file)] if program == "nginx" else ["run", "--adapter", "caddyfile", "--config", str(file)]
    with (directory / "proxy.log").open("w") as log:
        home = {"HOME": str(directory), "XDG_DATA_HOME": str(directory), "XDG_CONFIG_HOME": str(directory)}
        process = subprocess.Popen([shutil.which(program) or "", *arguments], stdout=log, stderr=log, env=home)
        try:
            yield f"https://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=START_S)


@pytest.fixture(scope="module")
def upstream(text_only: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str, str]]:
    """A server that trusts a proxy on another address, its own host and port, and a key."""
    directory, address = tmp_path_factory.mktemp("upstream"), own_address()
    key = add_key(directory / "data", "team")
    options = "--host", "0.0.0.0", "--trusted-proxy", address, "--long-poll-s", str(POLL_S)
    with ready(directory, *text_only, *options) as server:
        yield server, f"{address}:{server.url.rpartition(':')[2]}", key


@pytest.mark.parametrize("program", ["nginx", "caddy"])
def test_a_server_behind_a_proxy_is_used_as_one_without(
    program: str, upstream: tuple[Server, str, str], tmp_path: Path
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed here (apt-get install {program})")
    server, place, key = upstream
    for name, content in zip((".pem", ".key"), certificate(), strict=True):
        (tmp_path / f"tls{name}").write_bytes(content)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "tls.pem"))
    with proxied(program, tmp_path, place) as url:
        transport = httpx.HTTPTransport(verify=trusting, retries=20)
        with httpx.Client(
            base_url=f"{url}/api/v1", transport=transport, headers={"X-API-Key": key}, timeout=START_S
        ) as http:
            while http.get("livez").status_code == 502:
                time.sleep(0.1)
            model = RawModel(http, "text")
            large = [datum(text_input(seed, 200), seed) for seed in range(400)]  # over 1 MiB
            assert len(model.output(model.forward_backward(1, large, forward_only=True)).loss_fn_outputs) == 400
            waiting, began = model.optim_step(3, RAW_STEP), time.monotonic()
            assert http.post("retrieve_future", json={"request_id": waiting}).status_code == 408
            assert time.monotonic() - began >= POLL_S / 2
            assert "metrics" in model.result(model.optim_step(2, RAW_STEP))
            assert "metrics" in model.result(waiting)
            model.result(model.submit("save_weights_external", 4, path="a"))
            place = f"training_runs/{model.model_id}/checkpoints/external_weights/a/external_weights_urls"
            link = http.get(place).json()["urls"]["adapter_model.safetensors"]
            assert link.startswith(f"{url}/api/v1/download/")
            part, whole = http.get(link, headers={"Range": "bytes=8-99"}), http.get(link)
            assert (part.status_code, part.content) == (206, whole.content[8:100])
            lies = {"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "http"}
            assert http.get(place, headers=lies).json()["urls"]["adapter_model.safetensors"].startswith("https")
            assert httpx.get(f"{url}/metrics", verify=trusting, headers=lies).status_code == 404
    with server.client() as direct:  # on the machine, and by none of its names
        assert direct.get(place, headers={"X-API-Key": key}).json()["urls"]["adapter_config.json"].startswith("http:")
