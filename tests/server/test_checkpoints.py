"""Routes that manage one checkpoint."""

import time
from datetime import datetime
from typing import Any

import pytest

from tests.server.saving import new_run, save
from tests.server.serving import Served
from tinsmith.store.sweep import sweep


async def listed(server: Served, path: str) -> dict[str, Any]:
    """What the list of all checkpoints says of one."""
    page = (await server.client.get("/api/v1/checkpoints")).json()
    found: dict[str, Any] = next(checkpoint for checkpoint in page["checkpoints"] if checkpoint["tinker_path"] == path)
    return found


def url(path: str, action: str = "") -> str:
    """Where a checkpoint is managed."""
    return "/api/v1/training_runs/{}/checkpoints/{}/{}".format(*path.removeprefix("tinker://").split("/")) + action


async def test_publishing_twice_changes_nothing(server: Served) -> None:
    path = save(server, "tinker://m/sampler_weights/a").tinker_path
    for _ in range(2):
        assert (await server.client.post(url(path, "/publish"))).status_code == 200
        assert (await listed(server, path))["public"] is True
    for _ in range(2):
        assert (await server.client.delete(url(path, "/publish"))).status_code == 200
        assert (await listed(server, path))["public"] is False


async def test_a_time_to_live_is_set_and_taken_away(server: Served) -> None:
    path = save(server, "tinker://m/weights/a").tinker_path
    before = time.time()
    assert (await server.client.put(url(path, "/ttl"), json={"ttl_seconds": 3600})).status_code == 200
    expires_at = datetime.fromisoformat((await listed(server, path))["expires_at"]).timestamp()
    assert before <= expires_at - 3600 <= time.time()
    assert (await server.client.put(url(path, "/ttl"), json={"ttl_seconds": None})).status_code == 200
    assert (await listed(server, path))["expires_at"] is None
    for wrong in ({"ttl_seconds": 3599}, {"ttl_seconds": 11 * 366 * 86400}, {"ttl_seconds": "3600"}, {"ttl_seconds": 3600.5}, {}):
        reply = await server.client.put(url(path, "/ttl"), json=wrong)
        assert (reply.status_code, "ttl_seconds" in reply.json()["detail"]) == (400, True)


async def test_a_deleted_checkpoint_is_gone_at_once_and_its_files_soon(server: Served) -> None:
    saved = save(server, "tinker://m/weights/a")
    assert (await server.client.delete(url(saved.tinker_path))).status_code == 200
    assert (await server.client.delete(url(saved.tinker_path))).status_code == 404
    assert (await server.client.get("/api/v1/checkpoints")).json()["checkpoints"] == []
    assert server.hub.files.sizes(saved.directory) == {"weights": 10}
    await server.hub.lifetimes.sweep()
    assert server.hub.files.sizes(saved.directory) == {}


@pytest.mark.parametrize("method", ["DELETE", "POST /publish", "DELETE /publish", "PUT /ttl"])
async def test_a_checkpoint_that_is_not_there_is_not_managed(method: str, server: Served) -> None:
    save(server, "tinker://m/weights/expired", expires_at=1.0)
    verb, _, action = method.partition(" ")
    body = {"ttl_seconds": None} if action == "/ttl" else None
    for path in ("tinker://m/weights/never", "tinker://m/weights/expired"):
        reply = await server.client.request(verb, url(path, action), json=body)
        assert (reply.status_code, reply.json()["detail"].startswith(f"{path} does not exist")) == (404, True)
    for wrong in ("tinker://m/other/a", "tinker://m/weights/..%2Fa", "tinker://m/weights/%00"):
        reply = await server.client.request(verb, url(wrong, action), json=body)
        assert reply.status_code in (400, 404)
    assert server.store.checkpoint("tinker://m/weights/never") is None


async def test_weights_info_says_what_loading_needs(server: Served) -> None:
    save(server, "tinker://m/weights/a")
    full = {"rank": 0, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    save(server, "tinker://m/weights/full", lora_config=full)
    info = (await server.post("weights_info", {"tinker_path": "tinker://m/weights/a"})).json()
    switches = {"train_unembed": False, "train_mlp": True, "train_attn": True}
    expected = {"base_model": "tiny", "is_lora": True, "optimizer_config": {"type": "adamw"}, "lora_rank": 8}
    assert info == expected | switches
    info = (await server.post("weights_info", {"tinker_path": "tinker://m/weights/full"})).json()
    assert info == {"base_model": "tiny", "is_lora": False, "optimizer_config": {"type": "adamw"}}
    assert (await server.post("weights_info", {"tinker_path": "tinker://m/weights/b"})).status_code == 404
    assert (await server.post("weights_info", {"tinker_path": "weights/b"})).status_code == 400


async def test_a_copy_shares_files_and_outlives_its_source(server: Served) -> None:
    source = save(server, f"tinker://{await new_run(server)}/sampler_weights/a", user_metadata={"k": "v"}, public=True)
    body = {"source_path": source.tinker_path, "destination_project_id": "archive", "ttl_seconds": 7200}
    key = {"X-Idempotency-Key": "k1"}
    before = time.time()
    paths = [(await server.post("copy_weights", body, headers=key)).json()["tinker_path"] for _ in range(2)]
    assert paths[0] == paths[1] != source.tinker_path
    other = (await server.post("copy_weights", body, headers={"X-Idempotency-Key": "k2"})).json()["tinker_path"]
    assert other not in (paths[0], source.tinker_path)
    copy = server.store.require_checkpoint(paths[0], "sampler")
    assert (copy.directory, copy.user_metadata, copy.public) == (source.directory, {"k": "v"}, False)
    assert before <= (copy.expires_at or 0) - 7200 <= time.time()
    runs = (await server.client.get("/api/v1/training_runs?project_id=archive")).json()
    assert {run["training_run_id"] for run in runs["training_runs"]} == {copy.model_id, other.split("/")[2]}
    step = await server.post("optim_step", {"model_id": copy.model_id, "seq_id": 1, "adam_params": {}})
    failed = (await server.post("retrieve_future", {"request_id": step.json()["request_id"]})).json()
    assert failed["category"] == "user"
    for path in (source.tinker_path, other):
        await server.client.delete(url(path))
        sweep(server.store, server.hub.files)
        assert server.hub.files.sizes(source.directory) == {"weights": 10}
    await server.client.delete(url(paths[0]))
    sweep(server.store, server.hub.files)
    assert server.hub.files.sizes(source.directory) == {}


async def test_a_copy_into_a_session_takes_the_number_of_a_run(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await new_run(server, session_id)
    source = save(server, f"tinker://{model_id}/weights/a").tinker_path
    body = {"source_path": source, "session_id": session_id, "model_seq_id": 1}
    for _ in range(2):
        assert (await server.post("copy_weights", body)).json() == {"tinker_path": f"tinker://{session_id}:train:1/weights/a"}
    other = save(server, f"tinker://{model_id}/weights/b").tinker_path
    for taken in ({"model_seq_id": 0}, {"source_path": other}):
        refused = await server.post("copy_weights", body | taken)
        assert (refused.status_code, "has a run of that number already" in refused.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("change", "status", "complaint"),
    [
        ({"source_path": "tinker://m/weights/never"}, 404, "does not exist"),
        ({"source_path": "nothing"}, 400, "is not tinker://"),
        ({"destination_project_id": None}, 400, "send either destination_project_id, or session_id and model_seq_id"),
        ({"session_id": "s", "model_seq_id": 1}, 400, "send either destination_project_id"),
        ({"session_id": "s"}, 400, "send either destination_project_id"),
        ({"destination_project_id": None, "session_id": "s", "model_seq_id": 1}, 404, "session 's' does not exist"),
        ({"ttl_seconds": 1}, 400, "ttl_seconds"),
        ({"weights_access_token": "t"}, 400, "weights_access_token"),
    ],
)
async def test_a_copy_that_cannot_be_made_is_refused(change: dict[str, object], status: int, complaint: str, server: Served) -> None:
    save(server, "tinker://m/weights/a")
    body = {"source_path": "tinker://m/weights/a", "destination_project_id": "p"} | change
    reply = await server.post("copy_weights", {name: value for name, value in body.items() if value is not None})
    assert (reply.status_code, complaint in reply.json()["detail"]) == (status, True), reply.text
    of_another = await server.post("copy_weights", body, headers={"X-Tinker-Weights-Access-Token": "t"})
    assert of_another.status_code == 400
