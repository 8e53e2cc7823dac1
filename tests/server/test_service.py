"""Routes around training and sampling, and what their replies tell of the server's machine."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.server.serving import FACTS, Served, served
from tinsmith.config import Config, VLLMConfig
from tinsmith.server.wording import private_places, without_paths
from tinsmith.store.records import Outcome


async def test_client_config_names_what_is_built(tmp_path: Path) -> None:
    async with served(tmp_path, fwdbwd_max_chunk_len=7) as server:
        assert await server.answer("client/config", {"sdk_version": "0.38.0"}) == {
            "proto_compress_fwdbwd": True,
            "proto_write_fwdbwd": True,
            "fwd_via_fwdbwd": True,
            "create_model_via_load_weights": True,
            "fwdbwd_max_chunk_len": 7,
            "sample_join_sampling_session": True,
            "sample_use_retrieve_futures": True,
        }
        dynamic = await server.answer("client/dynamic_config", {"sdk_version": "0.38.0"})
        assert dynamic == {"refresh_interval_sec": 300, "sample_cancel_enabled": True}
        assert await server.answer("telemetry", {"events": [{"anything": 1}]}) == {"status": "accepted"}


async def test_capabilities_list_the_base_models_once_there_is_an_engine(tmp_path: Path) -> None:
    async with served(tmp_path, facts=None) as server:
        assert (await server.get("get_server_capabilities")).status_code == 503
        expected = {"model_name": "tiny", "max_context_length": 24, "trainable": True, "sampleable": True}
        server.hub.base_models.replace([FACTS.to_dict()])
        assert await server.shown("get_server_capabilities") == {"supported_models": [expected]}
        server.hub.base_models.replace([FACTS.to_dict() | {"max_trained": 0}])  # the memory has no room to train
        changed = expected | {"max_context_length": 32, "trainable": False}
        assert await server.shown("get_server_capabilities") == {"supported_models": [changed]}


async def test_without_keys_everybody_has_the_same_one(server: Served) -> None:
    assert (await server.shown("auth/apikey/me"))["note"] == "this server has no keys, and checks none"


async def test_a_client_of_a_version_that_does_not_work_is_told_which_do(server: Served) -> None:
    for version in ("0.22.3", "0.22.10", "0.30", "0.38.0", "0.38.0rc1", "", "main", "٣.٤"):
        assert (await server.answer("create_session", {"sdk_version": version})).keys() == {"type", "session_id"}, (
            version
        )
    for version, fault in (
        ("0.22.2", "too old"),
        ("0.9.0", "too old"),
        ("0.38.1", "newer"),
        ("0.100.0", "newer"),
        ("1.0", "newer"),
    ):
        told = (await server.answer("create_session", {"sdk_version": version}))["error_message"]
        assert told.startswith(f"tinker {version} is {fault}")
        assert told.endswith("It works with 0.22.3 to 0.38.0; pip install tinker==0.38.0")


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


@pytest.mark.parametrize(("client", "is_here"), [("127.0.0.1", True), ("10.0.0.7", True), ("10.0.0.8", False)])
async def test_only_a_client_on_this_machine_is_told_of_a_directory_and_what_was_sent_is_told_as_it_came(
    server: Served, tmp_path: Path, client: str, is_here: bool
) -> None:
    server.client._transport.client = (client, 1)  # type: ignore[attr-defined]
    server.client.base_url = "http://10.0.0.7" if client == "10.0.0.7" else "http://localhost"
    session_id = await server.new_session()
    model_id = await server.new_model(session_id)
    data = (await server.answer("get_info", {"model_id": model_id}))["model_data"]
    assert (data["tokenizer_id"], data["model_name"]) == ("/models/tiny" if is_here else None, "tiny")
    body: dict[str, Any] = {"session_id": session_id, "model_seq_id": 1, "lora_config": {"rank": 8}}
    for asked in (str(tmp_path), "/models/tiny"):
        served_so = "is a directory; give the name under which it is served: 'tiny'"
        said = served_so if is_here and asked == "/models/tiny" else "is not served here; there are: tiny"
        assert await server.refusal("create_model", body | {"base_model": asked}, 404) == f"base_model {asked!r} {said}"
    said = f"{str(tmp_path)!r} is wrong"
    server.finish(Outcome(await server.step(model_id, 1), None, None, said, "user"))
    server.finish(Outcome(await server.step(model_id, 2), None, None, said, "server"))
    told = [(await server.result(f"{model_id}/{seq_id}"))["error"] for seq_id in (1, 2)]
    assert told == [said, "'DATA_DIR' is wrong"]
