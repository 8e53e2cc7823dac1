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

from tests.server.serving import Served, refused, served
from tinsmith.errors import ConfigError
from tinsmith.server.routes.downloads import wanted_bytes
from tinsmith.server.signatures import UrlSigner

FILES = {
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": bytes(range(256)) * 8192,
    "deep/a b%2F.bin": b"x",
    "empty": b"",
}
PATH = "tinker://m/external_weights/a"


async def addresses(server: Served, run_id: str = "m", name: str = "a") -> dict[str, str]:
    """Where each file of external weights can be fetched."""
    shown = await server.shown(f"training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls")
    urls: dict[str, str] = shown["urls"]
    return urls


def changed(url: str, **parameters: str) -> str:
    return str(httpx.URL(url).copy_merge_params(parameters))


async def test_every_file_has_an_address_that_needs_no_key(server: Served) -> None:
    server.save("tinker://s:train:0/external_weights/a b", FILES)
    urls = await addresses(server, "s:train:0", "a b")
    assert list(urls) == sorted(FILES)
    for name, url in urls.items():
        reply = await server.client.get(url)
        assert (reply.status_code, reply.content, reply.headers["content-length"]) == (
            200,
            FILES[name],
            str(len(FILES[name])),
        ), url
        assert url.startswith("http://localhost/api/v1/download/s%3Atrain%3A0/a%20b/")
    server.save("tinker://m/weights/a")
    wrong_kind = await server.get("training_runs/m/checkpoints/weights/a/external_weights_urls")
    assert "saved for training; download a path of save_weights_external" in refused(wrong_kind)
    assert (await server.get("training_runs/m/checkpoints/external_weights/b/external_weights_urls")).status_code == 404


async def test_an_address_is_good_for_its_file_and_its_time_only(tmp_path: Path) -> None:
    async with served(tmp_path, download_ttl_s=60) as server:
        server.save("tinker://m/external_weights/other", FILES)
        place, before = server.save(PATH, FILES).directory, int(time.time())
        url = (await addresses(server))["adapter_config.json"]
        expires = int(parse_qs(urlsplit(url).query)["expires"][0])
        assert before <= expires - 60 <= time.time()
        past = before - 1
        for wrong, reason in (
            (changed(url, expires=str(expires + 1)), "is not valid"),
            (changed(url, signature="0" * 64), "is not valid"),
            (changed(url, signature="ä"), "is not valid"),
            (url.replace("adapter_config.json", "adapter_model.safetensors"), "is not valid"),
            (url.replace("/a/", "/other/"), "is not valid"),
            (url.replace("adapter_config.json", "..%2F..%2Ftinsmith.db"), "is not valid"),
            (
                changed(url, expires=str(past), signature=server.front.signer.sign(past, place, "adapter_config.json")),
                "has expired",
            ),
        ):
            assert reason in refused(await server.client.get(wrong), 403), wrong
        assert (await server.client.get(url.partition("?")[0])).status_code == 400


async def test_an_address_ends_with_its_checkpoint_and_outlives_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        server.save(PATH, FILES)
        url = (await addresses(server))["adapter_config.json"]
    async with served(tmp_path) as server:
        assert (await server.client.get(url)).content == b"{}"
        server.save(PATH, {"adapter_config.json": b"[]"})
        assert (await server.client.get(url)).status_code == 403
        await server.client.delete("/api/v1/training_runs/m/checkpoints/external_weights/a")
        assert (await server.client.get(url)).status_code == 403  # as one that was never there


async def test_a_download_that_broke_off_goes_on(server: Served) -> None:
    server.save(PATH, FILES)
    urls, content = await addresses(server), FILES["adapter_model.safetensors"]
    size = len(content)
    for asked, status, expected, content_range in (
        ("bytes=1048575-", 206, content[1048575:], f"bytes 1048575-{size - 1}/{size}"),
        ("bytes=3-5", 206, content[3:6], f"bytes 3-5/{size}"),
        (f"bytes={size}-", 416, None, f"bytes */{size}"),
    ):
        reply = await server.client.get(urls["adapter_model.safetensors"], headers={"Range": asked})
        assert (reply.status_code, reply.headers["content-range"]) == (status, content_range)
        if expected is not None:
            assert (reply.content, reply.headers["content-length"]) == (expected, str(len(expected)))
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
    await server.step(await server.new_run(session_id), 1)
    exported = await server.shown(f"sessions/{session_id}/trace_export")
    assert exported["status"] == "ready"
    events = json.loads((await server.client.get(exported["url"])).content)["traceEvents"]
    made, queued = [("b", "create_model", "done"), ("e", "create_model", "done")], ("b", "optim_step", "queued")
    assert [(event["ph"], event.get("name"), event.get("cat")) for event in events] == [
        ("M", "process_name", None),
        *made,
        queued,
    ]
    assert 0 <= events[2]["ts"] - events[1]["ts"] < 60e6
    assert (await server.client.get(changed(exported["url"], signature="x"))).status_code == 403
    assert (await server.get("sessions/x/trace_export")).status_code == 404


def test_the_key_is_private_and_stays(tmp_path: Path) -> None:
    first, key = UrlSigner(tmp_path), tmp_path / "signing.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    UrlSigner(tmp_path).check(first.sign(2**40, "a", "b"), 2**40, "a", "b")
    (tmp_path / "elsewhere").mkdir()
    others = UrlSigner(tmp_path / "elsewhere").sign(2**40, "a", "b"), first.sign(2**40, "ab")
    assert first.sign(2**40, "a", "b") not in others
    key.write_bytes(b"short")
    with pytest.raises(ConfigError, match="must hold 32 bytes, it holds 5; delete it"):
        UrlSigner(tmp_path)
