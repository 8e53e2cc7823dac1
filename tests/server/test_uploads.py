"""Uploads of adapters over HTTP: those that end too early leave nothing, and PostgreSQL takes what they become."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.databases import PostgreSQL
from tests.server.serving import FACTS, Served, served
from tests.server.test_engine_process import until
from tinsmith.server.app import create_app, http_config
from tinsmith.server.routes import uploads as routes
from tinsmith.store import catalog
from tinsmith.store.store import Store
from tinsmith.wire.service_requests import CreateSessionRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LORA = {"rank": 4, "seed": 3, "train_unembed": False}


async def start(server: Served) -> tuple[dict[str, Any], Path]:
    """A new upload, and the directory of its files."""
    begun = await server.answer("external_weights_upload_start", {"base_model": "tiny", "lora_config": LORA})
    return begun, server.front.uploads.directory(server.front.uploads.require(begun["upload_id"]))


def is_alone(place: Path) -> bool:
    """Whether nothing is left but what the upload is about."""
    return [each.name for each in place.iterdir()] == ["upload.json"]


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_file_that_stalls_is_given_up_and_may_be_sent_again(tmp_path: Path, leaves: bool) -> None:
    async with served(tmp_path, connection_idle_s=3600.0 if leaves else 0.5) as server:
        http = uvicorn.Server(http_config(create_app(server.front), server.hub.config.server))
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(http.serve([listener]))
        begun, place = await start(server)
        url = begun["urls"][CONFIG]
        reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        path = url.partition("://")[2].partition("/")[2]
        writer.write(f"PUT /{path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{{".encode())
        if leaves:
            await until((place / f".{CONFIG}").exists)
        else:
            async with asyncio.timeout(60):
                assert await reader.read() == b""
        writer.close()
        await until(lambda: is_alone(place))
        assert (await server.client.put(url, content=b"{}")).status_code == 200
        assert (place / CONFIG).read_bytes() == b"{}"
        http.should_exit = True
        await serving


async def test_a_file_whose_upload_expires_while_it_comes_is_given_up(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, place = await start(server)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        later = time.time() + 10**6
        monkeypatch.setattr(routes, "time", SimpleNamespace(time=lambda: later))
        yield b"}"

    reply = await server.client.put(begun["urls"][CONFIG], content=slow(), headers={"Content-Length": "2"})
    assert (reply.status_code, "has expired while this came; start another one" in reply.text) == (400, True)
    assert is_alone(place)


async def test_postgresql_takes_the_checkpoints_of_an_upload(
    tmp_path: Path, postgresql: PostgreSQL, family_dir: Callable[[str], Path]
) -> None:
    model = family_dir("qwen3")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter = LoraConfig(r=4, lora_alpha=4, target_modules=targets)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), adapter).save_pretrained(str(tmp_path / "made"))
    postgresql.serve(tmp_path)
    async with served(tmp_path, facts=replace(FACTS, tokenizer_id=str(model))) as server:
        begun, place = await start(server)
        for file, url in begun["urls"].items():
            assert (await server.client.put(url, content=(tmp_path / "made" / file).read_bytes())).status_code == 200
        asked = {"upload_id": begun["upload_id"]}
        path = (await server.answer("external_weights_upload_finish", asked))["tinker_path"]
        assert not place.exists()
        assert await server.answer("external_weights_upload_finish", asked) == {"tinker_path": path}
        sampled, trained = (
            server.store.checkpoint(each) for each in (path, path.replace("/sampler_weights/", "/weights/"))
        )
        assert sampled is not None
        assert trained is not None
        assert (sampled.directory, sampled.lora_config["rank"]) == (trained.directory, 4)
        assert sampled.size_bytes > (tmp_path / "made" / WEIGHTS).stat().st_size // 2
        found = await server.shown(f"training_runs/{sampled.model_id}")
        assert found["base_model"] == "tiny"
        run = server.store.model(sampled.model_id)
        assert run is not None
        again = server.hub.files.new_place()  # of a server that was killed before it could forget the upload
        server.store.announce_checkpoint(again)
        catalog.put_uploaded(
            server.store, run, CreateSessionRequest().model_dump(), [replace(sampled, directory=again)]
        )
        assert server.store.checkpoint(path) == sampled
    with closing(Store.open(tmp_path)) as store:
        assert store.checkpoint(path) == sampled
