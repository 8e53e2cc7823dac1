"""Service and session routes."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.serving import FACTS, Served, served
from tinsmith.config import Config, ServerConfig, VLLMConfig
from tinsmith.server.app import create_app
from tinsmith.server.replies import private_places, without_paths
from tinsmith.store.records import Outcome


async def test_a_server_without_an_engine_is_not_healthy(tmp_path: Path) -> None:
    async with served(tmp_path, facts=None) as server:
        reply = await server.client.get("/api/v1/healthz")
        assert reply.status_code == 503
        assert reply.json()["detail"] == "the engine is starting"
        assert (await server.client.get("/api/v1/get_server_capabilities")).status_code == 503


async def test_client_config_names_what_is_built(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(fwdbwd_max_chunk_len=7))) as server:
        flags = (await server.post("client/config", {"sdk_version": "0.38.0"})).json()
        assert flags == {
            "proto_compress_fwdbwd": True,
            "proto_write_fwdbwd": True,
            "fwd_via_fwdbwd": True,
            "create_model_via_load_weights": True,
            "fwdbwd_max_chunk_len": 7,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": True,
        }
        dynamic = (await server.post("client/dynamic_config", {"sdk_version": "0.38.0"})).json()
        assert dynamic == {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
        assert (await server.post("telemetry", {"events": [{"anything": 1}]})).json() == {"status": "accepted"}


async def test_capabilities_list_the_base_models(server: Served) -> None:
    reply = await server.client.get("/api/v1/get_server_capabilities")
    expected = {"model_name": "tiny", "max_context_length": 24, "trainable": True, "sampleable": True}
    assert reply.json() == {"supported_models": [expected]}
    server.hub.base_models.replace([FACTS.to_dict() | {"max_trained": 0}])  # the memory has no room to train
    reply = await server.client.get("/api/v1/get_server_capabilities")
    assert reply.json() == {"supported_models": [expected | {"max_context_length": 32, "trainable": False}]}


async def test_a_session_lives_until_it_is_finished(server: Served) -> None:
    session_id = await server.new_session()
    heartbeat = {"session_id": session_id, "type": "session_heartbeat"}
    assert (await server.post("session_heartbeat", heartbeat)).json() == {"type": "session_heartbeat"}
    finish = {"reason": {"type": "success"}, "detail": None}
    assert (await server.post(f"sessions/{session_id}/finish", finish)).status_code == 200
    assert (await server.post(f"sessions/{session_id}/finish", finish)).status_code == 200
    assert (await server.post("session_heartbeat", heartbeat)).status_code == 410


async def test_a_base_url_with_the_prefix_of_the_api_is_told_to_leave_it_off(server: Served) -> None:
    """The first thing that a client of `base_url=http://localhost/api/v1` asks for."""
    reply = await server.client.post("/api/v1/api/v1/client/config", json={"sdk_version": "0.38.0"})
    assert reply.status_code == 404
    assert reply.json()["detail"] == (
        "/api/v1/api/v1/client/config does not exist: the client adds /api/v1 to its base_url by itself; "
        "leave it off, as in base_url='http://localhost'"
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "training_runs/x/archive"), ("POST", "no/such/thing"), ("DELETE", "training_runs/x"), ("GET", "create_session")],
)
async def test_what_is_not_built_is_said_to_be(server: Served, method: str, path: str) -> None:
    reply = await server.client.request(method, f"/api/v1/{path}")
    assert reply.status_code == 404
    assert reply.json()["detail"] == f"{method} /api/v1/{path} is not built in this version of Tinsmith"


async def test_nothing_is_billed_and_nothing_audited(server: Served) -> None:
    for path, key in (
        ("billing/usage/events?starting_on=2026-01-01&ending_before=2026-01-02", "data"),
        ("billing/usage/checkpoints/current?project_id=p", "data"),
        ("audit?event_type=checkpoint&day=2026-01-01", "entries"),
    ):
        reply = await server.client.get(f"/api/v1/{path}")
        assert (reply.status_code, reply.json()) == (200, {key: []})


async def test_any_key_is_the_owners_and_none_can_be_revoked(server: Served) -> None:
    key = (await server.client.get("/api/v1/auth/apikey/me")).json()
    assert (key["name"], key["note"]) == ("local", "this server does not check keys")
    refused = await server.client.delete("/api/v1/auth/apikey/me")
    assert (refused.status_code, "keeps no API keys" in refused.json()["detail"]) == (404, True)


async def test_a_client_of_a_version_that_does_not_work_is_told_which_do(server: Served) -> None:
    for version in ("0.22.3", "0.22.10", "0.30", "0.38.0", "0.38.0rc1", "", "main", "٣.٤"):
        assert (await server.post("create_session", {"sdk_version": version})).json().keys() == {"type", "session_id"}, version
    for version, fault in (("0.22.2", "too old"), ("0.9.0", "too old"), ("0.38.1", "newer"), ("0.100.0", "newer"), ("1.0", "newer")):
        told = (await server.post("create_session", {"sdk_version": version})).json()["error_message"]
        assert told.startswith(f"tinker {version} is {fault}")
        assert told.endswith("It works with 0.22.3 to 0.38.0; pip install tinker==0.38.0")


async def test_clients_are_not_told_where_the_server_keeps_its_files(server: Served, tmp_path: Path) -> None:
    model_id = await server.new_model(await server.new_session())
    full = f"tinker://m/weights/a could not be written: [Errno 28] No space left on device: '{tmp_path}/checkpoints/a b/x'; /models/tiny/a"
    server.finish(Outcome(f"{model_id}/0", None, None, full, "server"))
    told = (await server.post("retrieve_future", {"request_id": f"{model_id}/0"})).json()["error"]
    shown = "'DATA_DIR/checkpoints/a b/x'; tiny/a"
    assert told == f"tinker://m/weights/a could not be written: [Errno 28] No space left on device: {shown}"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("see /srv/d.", "see DATA_DIR."),
        ("file:///srv/d/x, sqlite:////srv/d/tinsmith.db", "file://DATA_DIR/x, sqlite:///DATA_DIR/tinsmith.db"),
        ("/srv/hub/models--a/x: /srv/hub.old, /srv/vllm/w", "HF_HUB_CACHE/models--a/x: /srv/hub.old, VLLM_DIR/w"),
        (f"{tempfile.gettempdir()}/a {sys.prefix}/lib {Path.home()}/.cache", "TMPDIR/a PYTHON/lib ~/.cache"),
        ("tinker://srv/d /x/srv/d", "tinker://srv/d /x/srv/d"),
    ],
)
def test_a_path_is_hidden_wherever_it_stands(said: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.endswith(("_HOME", "_CACHE", "_DIR")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", "/srv/hub")
    assert without_paths(said, private_places(Config(vllm=VLLMConfig(vllm_dir="/srv/vllm")), Path("/srv/d"))) == told


@pytest.mark.parametrize("client", ["127.0.0.1", "10.0.0.8"])
async def test_what_a_client_sent_is_told_as_it_came(server: Served, client: str, tmp_path: Path) -> None:
    session_id = await server.new_session()
    server.client._transport.client = (client, 1)  # type: ignore[attr-defined]
    body: dict[str, Any] = {"session_id": session_id, "model_seq_id": 0, "lora_config": {"rank": 8}}
    for asked in (str(tmp_path), "/models/tiny"):
        refused = await server.post("create_model", body | {"base_model": asked})
        there = client == "127.0.0.1" and asked == "/models/tiny"
        said = "is a directory; give the name under which it is served: 'tiny'" if there else "is not served here; there are: tiny"
        assert (refused.status_code, refused.json()["detail"]) == (404, f"base_model {asked!r} {said}")
    failed = f"name {str(tmp_path)!r} is wrong"
    model_id = await server.new_model(session_id)
    server.finish(Outcome(f"{model_id}/0", None, None, failed, "user"))
    assert (await server.post("retrieve_future", {"request_id": f"{model_id}/0"})).json()["error"] == failed


@pytest.mark.parametrize(("client", "told"), [("127.0.0.1", "/models/tiny"), ("10.0.0.7", "/models/tiny"), ("10.0.0.8", None)])
async def test_a_client_elsewhere_is_not_told_of_a_directory_here(server: Served, client: str, told: str | None) -> None:
    model_id = await server.new_model(await server.new_session())
    transport = httpx.ASGITransport(create_app(server.hub), client=(client, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://10.0.0.7") as other:
        info = (await other.post("/api/v1/get_info", json={"model_id": model_id})).json()
    assert info["model_data"]["tokenizer_id"] == told
    assert info["model_data"]["model_name"] == "tiny"
