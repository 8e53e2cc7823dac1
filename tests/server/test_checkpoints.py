"""Routes that manage one checkpoint."""

import time
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.server.serving import SHAPE, Served, refused
from tests.server.test_tenants import key, speaking
from tinsmith.errors import NotFoundError
from tinsmith.store import catalog
from tinsmith.store.keys import add_key
from tinsmith.store.store import sweep
from tinsmith.store.usage import stored_bytes

pytestmark = pytest.mark.usefixtures("database")

A = "tinker://m/weights/a"


async def manage(server: Served, path: str, method: str, body: Any = None) -> httpx.Response:
    """The answer to a method, with the rest of its path behind a space, at the place of a checkpoint."""
    verb, _, action = method.partition(" ")
    place = "training_runs/{}/checkpoints/{}/{}".format(*path.removeprefix("tinker://").split("/"))
    return await server.client.request(verb, f"/api/v1/{place}{action}", json=body)


async def test_publishing_and_a_time_to_live_are_set_and_taken_away(server: Served) -> None:
    async def listed() -> Any:
        return (await server.shown("checkpoints"))["checkpoints"][0]

    server.save(A)
    # Twice changes nothing
    for method, public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        assert (await manage(server, A, f"{method} /publish")).status_code == 200
        assert (await listed())["public"] is public
    before = time.time()
    assert (await manage(server, A, "PUT /ttl", {"ttl_seconds": 3600})).status_code == 200
    assert before <= datetime.fromisoformat((await listed())["expires_at"]).timestamp() - 3600 <= time.time()
    assert (await manage(server, A, "PUT /ttl", {"ttl_seconds": None})).status_code == 200
    assert (await listed())["expires_at"] is None
    for wrong in (
        {"ttl_seconds": 3599},
        {"ttl_seconds": 11 * 366 * 86400},
        {"ttl_seconds": "3600"},
        {"ttl_seconds": 3600.5},
        {},
    ):
        assert "ttl_seconds" in refused(await manage(server, A, "PUT /ttl", wrong))


async def test_a_deleted_checkpoint_is_gone_at_once_and_can_be_restored_for_a_day(server: Served) -> None:
    saved = server.save(A)
    await manage(server, A, "DELETE")
    told = await server.refusal("weights_info", {"tinker_path": A}, 404)
    assert f"`tinsmith checkpoints restore {A}` beside the server brings it back" in told
    assert stored_bytes(server.store) == {"local": saved.size_bytes}
    catalog.restore_checkpoint(server.store, A)
    with pytest.raises(NotFoundError, match="is no deleted checkpoint"):
        catalog.restore_checkpoint(server.store, A)
    assert len((await server.shown("checkpoints"))["checkpoints"]) == 1
    assert [(await manage(server, A, "DELETE")).status_code for _ in range(2)] == [200, 404]
    assert (await server.shown("checkpoints"))["checkpoints"] == []
    for sizes in ({"weights": 10}, {}):
        await server.hub.lifetimes.sweep()
        assert server.hub.files.at(saved.directory).sizes() == sizes
        if sizes:
            catalog.purge_checkpoint(server.store, A)
    assert stored_bytes(server.store) == {}


async def test_no_checkpoint_of_a_tenant_lives_longer_than_its_keys_say(server: Served) -> None:
    async with speaking(server, add_key(server.store, key("team", checkpoint_ttl_s=7200.0))) as team:
        path = server.save(f"tinker://{await team.new_run()}/weights/a", tenant="team").tinker_path
        for ttl_s, shown in ((7201, "7201"), (None, "null")):
            told = refused(await manage(team, path, "PUT /ttl", {"ttl_seconds": ttl_s}))
            assert f"ttl_seconds={shown} is longer than the 7200 s" in told
        assert (await manage(team, path, "PUT /ttl", {"ttl_seconds": 7200})).status_code == 200
        body = {"source_path": path, "destination_project_id": "archive"}
        assert "ttl_seconds=9999 is longer" in await team.refusal("copy_weights", body | {"ttl_seconds": 9999})
        before = time.time()
        copy = (await team.answer("copy_weights", body))["tinker_path"]
        assert before <= (server.store.require_checkpoint(copy).expires_at or 0) - 7200 <= time.time()


@pytest.mark.parametrize("method", ["DELETE", "POST /publish", "DELETE /publish", "PUT /ttl"])
async def test_a_checkpoint_that_is_not_there_is_not_managed(method: str, server: Served) -> None:
    server.save("tinker://m/weights/expired", expires_at=1.0)
    body = {"ttl_seconds": None} if method == "PUT /ttl" else None
    for path in ("tinker://m/weights/never", "tinker://m/weights/expired"):
        assert refused(await manage(server, path, method, body), 404).startswith(f"{path} does not exist")
    for wrong in ("tinker://m/other/a", "tinker://m/weights/..%2Fa", "tinker://m/weights/%00"):
        assert (await manage(server, wrong, method, body)).status_code in (400, 404)
    assert server.store.checkpoint("tinker://m/weights/never") is None


async def test_weights_info_says_what_loading_needs(server: Served) -> None:
    adamw = {"base_model": "tiny", "optimizer_config": {"type": "adamw"}}
    switches = {"train_unembed": False, "train_mlp": True, "train_attn": True}
    for rank, expected in ((8, {"is_lora": True, "lora_rank": 8} | switches), (0, {"is_lora": False})):
        server.save(A, lora_config=SHAPE | {"rank": rank})
        assert await server.answer("weights_info", {"tinker_path": A}) == adamw | expected
    for path, status in (("tinker://m/weights/b", 404), ("weights/b", 400)):
        await server.refusal("weights_info", {"tinker_path": path}, status)


async def test_a_copy_shares_files_and_outlives_its_source(server: Served) -> None:
    source = server.save(f"tinker://{await server.new_run()}/sampler_weights/a", user_metadata={"k": "v"}, public=True)
    body, before = (
        {"source_path": source.tinker_path, "destination_project_id": "archive", "ttl_seconds": 7200},
        time.time(),
    )
    first, again, other = [
        (await server.answer("copy_weights", body, headers={"X-Idempotency-Key": key}))["tinker_path"]
        for key in ("k1", "k1", "k2")
    ]
    assert (first == again, len({source.tinker_path, first, other})) == (True, 3)
    copy = server.store.require_checkpoint(first, "sampler")
    assert (copy.directory, copy.user_metadata, copy.public) == (source.directory, {"k": "v"}, False)
    assert before <= (copy.expires_at or 0) - 7200 <= time.time()
    runs = (await server.shown("training_runs?project_id=archive"))["training_runs"]
    assert {run["training_run_id"] for run in runs} == {copy.model_id, other.split("/")[2]}
    assert (await server.result(await server.step(copy.model_id, 1)))["category"] == "user"
    for path, sizes in ((source.tinker_path, {"weights": 10}), (other, {"weights": 10}), (first, {})):
        await manage(server, path, "DELETE")
        catalog.purge_checkpoint(server.store, path)
        sweep(server.store, server.hub.files)
        assert server.hub.files.at(source.directory).sizes() == sizes


async def test_a_copy_into_a_session_takes_the_number_of_a_run(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_run(session_id)
    source, other = [server.save(f"tinker://{model_id}/weights/{name}").tinker_path for name in "ab"]
    body = {"source_path": source, "session_id": session_id, "model_seq_id": 1}
    for _ in range(2):
        assert await server.answer("copy_weights", body) == {"tinker_path": f"tinker://{session_id}:train:1/weights/a"}
    for taken in ({"model_seq_id": 0}, {"source_path": other}):
        assert "has a run of that number already" in await server.refusal("copy_weights", body | taken)


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
async def test_a_copy_that_cannot_be_made_is_refused(
    change: dict[str, object], status: int, complaint: str, server: Served
) -> None:
    server.save(A)
    body = {"source_path": A, "destination_project_id": "p"}
    assert complaint in await server.refusal(
        "copy_weights", {k: v for k, v in (body | change).items() if v is not None}, status
    )
    assert (await server.post("copy_weights", body, headers={"X-Tinker-Weights-Access-Token": "t"})).status_code == 400
