"""Signed addresses of files: external weights and traces.

Invariant: A download URL is valid for its file, its checkpoint and its time only.
"""

import json
import stat
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from tests.server.saving import new_run, save
from tests.server.serving import Served, served
from tinsmith.config import Config, ServerConfig
from tinsmith.errors import ConfigError
from tinsmith.server.ranges import wanted_bytes
from tinsmith.server.signatures import UrlSigner

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(range(256)) * 8192, "deep/a b%2F.bin": b"x", "empty": b""}


async def addresses(server: Served, path: str) -> dict[str, str]:
    """Where each file of external weights can be fetched."""
    run_id, _, name = path.removeprefix("tinker://").split("/")
    reply = await server.client.get(f"/api/v1/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
    assert reply.status_code == 200, reply.text
    urls: dict[str, str] = reply.json()["urls"]
    return urls


def changed(url: str, **parameters: str) -> str:
    """The address with other parameters."""
    return str(httpx.URL(url).copy_merge_params(parameters))


async def test_every_file_has_an_address_that_needs_no_key(server: Served) -> None:
    path = save(server, "tinker://s:train:0/external_weights/a b", FILES).tinker_path
    urls = await addresses(server, path)
    assert list(urls) == sorted(FILES)
    for name, url in urls.items():
        reply = await server.client.get(url)
        assert (reply.status_code, reply.content) == (200, FILES[name]), url
        assert reply.headers["content-length"] == str(len(FILES[name]))
        assert url.startswith("http://localhost/api/v1/download/s%3Atrain%3A0/a%20b/")


async def test_an_address_is_good_for_its_file_and_its_time_only(tmp_path: Path) -> None:
    config = Config(server=ServerConfig(download_ttl_s=60))
    async with served(tmp_path, config) as server:
        save(server, "tinker://m/external_weights/other", FILES)
        path = save(server, "tinker://m/external_weights/a", FILES).tinker_path
        before = int(time.time())
        url = (await addresses(server, path))["adapter_config.json"]
        expires = int(parse_qs(urlsplit(url).query)["expires"][0])
        assert before <= expires - 60 <= time.time()
        for wrong in (
            changed(url, expires=str(expires + 1)),
            changed(url, signature="0" * 64),
            changed(url, signature="ä"),
            url.replace("adapter_config.json", "adapter_model.safetensors"),
            url.replace("/a/", "/other/"),
            url.replace("adapter_config.json", "..%2F..%2Ftinsmith.db"),
        ):
            reply = await server.client.get(wrong)
            assert (reply.status_code, "is not valid" in reply.json()["detail"]) == (403, True), wrong
        assert (await server.client.get(url.partition("?")[0])).status_code == 400
        past = int(time.time()) - 1
        place = server.store.require_checkpoint(path).directory
        late = changed(url, expires=str(past), signature=server.hub.signer.sign(past, place, "adapter_config.json"))
        reply = await server.client.get(late)
        assert (reply.status_code, "has expired" in reply.json()["detail"]) == (403, True)


async def test_an_address_ends_with_its_checkpoint_and_outlives_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        path = save(server, "tinker://m/external_weights/a", FILES).tinker_path
        url = (await addresses(server, path))["adapter_config.json"]
    async with served(tmp_path) as server:
        assert (await server.client.get(url)).content == b"{}"
        save(server, path, {"adapter_config.json": b"[]"})
        assert (await server.client.get(url)).status_code == 403
        await server.client.delete("/api/v1/training_runs/m/checkpoints/external_weights/a")
        assert (await server.client.get(url)).status_code == 404


async def test_only_external_weights_are_downloaded(server: Served) -> None:
    save(server, "tinker://m/weights/a")
    reply = await server.client.get("/api/v1/training_runs/m/checkpoints/weights/a/external_weights_urls")
    assert (reply.status_code, "saved for training; download a path of save_weights_external" in reply.text) == (400, True)
    reply = await server.client.get("/api/v1/training_runs/m/checkpoints/external_weights/b/external_weights_urls")
    assert reply.status_code == 404


async def test_a_download_that_broke_off_goes_on(server: Served) -> None:
    path = save(server, "tinker://m/external_weights/a", FILES).tinker_path
    urls = await addresses(server, path)
    content, url = FILES["adapter_model.safetensors"], urls["adapter_model.safetensors"]
    rest = await server.client.get(url, headers={"Range": "bytes=1048575-"})
    assert (rest.status_code, rest.content) == (206, content[1048575:])
    assert rest.headers["content-range"] == f"bytes 1048575-{len(content) - 1}/{len(content)}"
    some = await server.client.get(url, headers={"Range": "bytes=3-5"})
    assert (some.content, some.headers["content-length"]) == (content[3:6], "3")
    beyond = await server.client.get(url, headers={"Range": f"bytes={len(content)}-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{len(content)}")
    empty = await server.client.get(urls["empty"], headers={"Range": "bytes=0-"})
    assert (empty.status_code, empty.content) == (200, b"")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("bytes=0-", range(10)),
        ("bytes=2-4", range(2, 5)),
        ("bytes=2-99", range(2, 10)),
        ("bytes=-3", range(7, 10)),
        ("bytes=-99", range(10)),
        ("BYTES=9-9", range(9, 10)),
        ("bytes=10-", range(10, 10)),
        ("bytes=-0", range(10, 10)),
        ("bytes=4-2", range(10)),
        ("bytes=-", range(10)),
        ("bytes=0-1,3-4", range(10)),
        ("lines=0-1", range(10)),
        ("bytes=0-" + "9" * 30, range(10)),
        ("", range(10)),
    ],
)
def test_a_range_is_read_as_the_rfc_says(asked: str, expected: range) -> None:
    assert wanted_bytes({"range": asked}, 10) == expected
    assert wanted_bytes({"range": asked, "if-range": '"x"'}, 10) == range(10)


async def test_a_trace_shows_the_operations_of_a_session(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await new_run(server, session_id)
    await server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    exported = (await server.client.get(f"/api/v1/sessions/{session_id}/trace_export")).json()
    assert exported["status"] == "ready"
    trace = json.loads((await server.client.get(exported["url"])).content)
    shown = [(event["ph"], event.get("name"), event.get("cat")) for event in trace["traceEvents"]]
    assert shown == [
        ("M", "process_name", None),
        ("b", "create_model", "done"),
        ("e", "create_model", "done"),
        ("b", "optim_step", "queued"),
    ]
    begin, end = trace["traceEvents"][1:3]
    assert 0 <= end["ts"] - begin["ts"] < 60e6
    assert (await server.client.get(changed(exported["url"], signature="x"))).status_code == 403
    assert (await server.client.get("/api/v1/sessions/x/trace_export")).status_code == 404


def test_the_key_is_private_and_stays(tmp_path: Path) -> None:
    first = UrlSigner(tmp_path)
    key = tmp_path / "signing.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    UrlSigner(tmp_path).check(first.sign(2**40, "a", "b"), 2**40, "a", "b")
    (tmp_path / "elsewhere").mkdir()
    assert UrlSigner(tmp_path / "elsewhere").sign(2**40, "a", "b") != first.sign(2**40, "a", "b")
    assert first.sign(2**40, "ab") != first.sign(2**40, "a", "b")
    key.write_bytes(b"short")
    with pytest.raises(ConfigError, match="must hold 32 bytes, it holds 5; delete it"):
        UrlSigner(tmp_path)
