"""Tenants of one server: what belongs to another one is answered as what does not exist.

Invariant: No route tells a tenant of another's sessions, models, samples or checkpoints, or changes them.
"""

import asyncio
import hashlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import Engine, event

from tests.acceptance.fuzzing import BODIES, OUTSIDE
from tests.databases import run_sql
from tests.server.serving import PROTOBUF, Served, forward_backward_body, refused, served
from tinsmith.protocol.serving import Sample, SampleDone
from tinsmith.server import tenants
from tinsmith.server.access import PREFIX
from tinsmith.server.app import create_app
from tinsmith.store import disk, schema
from tinsmith.store.keys import add_key, list_keys, revoke_key, rotate_key
from tinsmith.store.records import ApiKey, Role
from tinsmith.store.sqlite import FILE_NAME
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")

KINDS = ("weights", "sampler_weights", "external_weights")
IN_PATHS = {"session_id": "{session}", "run_id": "{model}", "sampling_session_id": "{sampler}", "name": "kept"}
IN_PATHS |= {"file:path": "weights", "path:path": "nothing", "name:path": "live:{model}", "seq_id": "0"}
IN_PATHS |= {"owner": "{sampler}", "number": "1", "image": "0"}
IN_PATHS |= dict.fromkeys(("run", "upload_id", "file", "group", "member"), "0")
WITHOUT_JSON = {"{path:path}", "login", "logout"}
SIGNATURE = "?expires=4000000000&signature=x"
SAME_FOR_ALL = {"telemetry", "create_custom_loss", "sessions/search", "checkpoints/search"}
LOOKS = ("telemetry", "sessions/search", "checkpoints/search")
SAME_FOR_ALL |= {"download/{model}/kept/weights", "trace/{session}"}
"""Requests that name something and look at nothing, or want another proof than a key."""


def key(name: str, tenant: str = "", role: Role = "member", **limits: Any) -> ApiKey:
    return ApiKey(name, "", b"", tenant or name, role, **limits)


@asynccontextmanager
async def speaking(server: Served, text: str) -> AsyncIterator[Served]:
    """The server for a client with this key."""
    transport = httpx.ASGITransport(create_app(server.front))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={"X-API-Key": text}) as own:
        yield Served(server.hub, server.front, server.store, own)


async def belongings(server: Served) -> dict[str, str]:
    """One thing of each kind, by the placeholder that stands for it in bodies and paths."""
    session = await server.new_session()
    model = await server.new_run(session)
    sampler = await server.new_sampler(session_id=session)
    for kind in KINDS:
        server.save(f"tinker://{model}/{kind}/kept", tenant=server.store.tenant_of(session))
    server.hub.samples.add(f"{sampler}/1", 1, 10)
    body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": []}, "sampling_params": {}}
    tenant = server.store.tenant_of(session)
    assert tenant is not None
    kept = Sample(f"{sampler}/1", 1, "tiny", None, 1, stream=False, payload=json.dumps(body).encode(), tenant=tenant)
    server.hub.kept_samples.begin(kept)
    server.hub.kept_samples.end(SampleDone(kept.request_id, 1, b""))
    return {
        "session": session,
        "ending": await server.new_session(),
        "model": model,
        "eye": model,
        "sampler": sampler,
        "eye_sampler": sampler,
    }


def absent() -> dict[str, str]:
    """Ids of the same form, of nothing."""
    session = str(uuid4())
    model, sampler = f"{session}:train:0", f"{session}:sample:3"
    return {
        "session": session,
        "ending": str(uuid4()),
        "model": model,
        "eye": model,
        "sampler": sampler,
        "eye_sampler": sampler,
    }


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path below the API of every route of an application, but for streams, which do not end."""
    for route in app.routes:
        included: Any = getattr(route, "original_router", None)
        each: Any
        for each in [route] if included is None else included.routes:
            path = each.path.removeprefix(PREFIX).removeprefix("/")
            if not path.startswith("live/"):
                yield from ((method, path) for method in sorted(each.methods))


def requests_to(method: str, route: str) -> Iterator[tuple[str, Any]]:
    """Right requests to a route, with placeholders: path, and JSON body, None, or "protobuf"."""
    path = route
    for name, value in IN_PATHS.items():
        path = path.replace(f"{{{name}}}", "{ending}" if route.endswith("/finish") and "session" in name else value)
    for segment in KINDS if "{segment}" in path else [""]:
        where = path.replace("{segment}", segment)
        if route == "forward_backward":
            yield where, "protobuf"
        elif method in ("POST", "PUT") and not route.endswith("publish") and route not in WITHOUT_JSON:
            yield from ((where, body) for body in BODIES[route.replace(":path}", "}")])
        else:
            yield where, None


def filled(text: str, things: Mapping[str, str]) -> str:
    numbers = {"seq": "1", "eye_seq": "1", "sample": "7"}
    text = re.sub(r'"\{(seq|eye_seq|sample)\}"', lambda found: numbers[found[1]], text)
    return re.sub(r"\{(\w+)\}", lambda found: things[found[1]], text)


async def send(server: Served, method: str, path: str, body: Any, things: Mapping[str, str]) -> httpx.Response:
    place = f"{'' if path.startswith(OUTSIDE) else PREFIX}/{quote(filled(path, things))}"
    if path.startswith(("download", "trace/", "upload/")):
        place += SIGNATURE
    if body == "protobuf":
        return await server.client.post(place, content=forward_backward_body(things["model"], 1), headers=PROTOBUF)
    # Numbers stand in bodies as placeholders too
    content = None if body is None else filled(json.dumps(body).replace('"text"', '"tiny"'), things)
    headers = {} if content is None else {"Content-Type": "application/json"}
    return await server.client.request(method, place, content=content, headers=headers)


@contextmanager
def statements() -> Iterator[list[str]]:
    """What is asked of the database meanwhile, but for the keys, which are read from time to time."""
    asked: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "api_keys" not in statement:
            asked.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield asked
    finally:
        event.remove(Engine, "before_cursor_execute", note)


def rows(directory: Path) -> list[str]:
    return [
        f"{table}: {row}"
        for table in (*schema.metadata.tables, "alembic_version")
        for row in sorted(map(repr, run_sql(directory, f"SELECT * FROM {table}")))
        if table != "api_keys"
    ]


def without_ids(text: str, things: Mapping[str, str]) -> str:
    for name in sorted(things, key=lambda name: -len(things[name])):
        text = text.replace(things[name], "ID")
    return text


async def test_a_foreign_id_is_answered_as_one_that_does_not_exist_by_every_route(
    server: Served, tmp_path: Path
) -> None:
    """In body and time: with the same questions to the database. And its owner gets another answer."""
    texts = [add_key(server.store, key(name)) for name in ("alice", "bob")]
    async with speaking(server, texts[0]) as alice, speaking(server, texts[1]) as bob:
        foreign, own, never = await belongings(bob), await belongings(alice), absent()
        all_requests = [
            (method, path, body)
            for method, route in dict.fromkeys(routes_of(create_app(server.front)))
            for path, body in requests_to(method, route)
        ]
        assert len({path for _, path, _ in all_requests}) > 50
        varied = [
            (method, path, body, name)
            for method, path, body in all_requests
            for name in dict.fromkeys(re.findall(r"\{(\w+)\}", "{model}" if body == "protobuf" else path + str(body)))
            if name in foreign
        ]
        assert len(varied) > 60
        before, answers = [row for row in rows(tmp_path) if foreign["session"] in row], []
        for method, path, body, name in varied:
            seen = []
            for others in (never, foreign, never):  # the first makes known what is alice's own
                things = own | {name: others[name]}
                with statements() as asked:
                    reply = await send(alice, method, path, body, things)
                seen.append((reply.status_code, without_ids(reply.text, things), asked))
            assert seen[1] == seen[2], (method, path, body, name)
            assert seen[0][0] in (400, 403, 404, 410) or path in LOOKS, seen[0]
            answers.append(seen[0])
        assert [row for row in rows(tmp_path) if foreign["session"] in row] == before
        for method, path, body in all_requests:
            if not re.search(r"\{\w+\}", path + str(body)):
                assert foreign["session"] not in (await send(alice, method, path, body, own)).text, path
        for client, count in ((alice, 0), (bob, 1)):
            found = await client.answer("sessions/search", {"session_id": foreign["session"]})
            assert len(found["sessions"]) == count
        for (method, path, body, name), answer in zip(varied, answers, strict=True):
            reply = await send(bob, method, path, body, foreign)
            if path not in SAME_FOR_ALL:
                assert (reply.status_code, without_ids(reply.text, foreign)) != answer[:2], (method, path, body, name)


async def test_a_key_that_only_reads_changes_nothing(server: Served, tmp_path: Path) -> None:
    text = add_key(server.store, key("eve", "bob", "read-only"))
    async with speaking(server, add_key(server.store, key("bob"))) as bob, speaking(server, text) as eve:
        own = await belongings(bob)
        before, refusals = rows(tmp_path), 0
        for method, route in routes_of(create_app(server.front)):
            for path, body in requests_to(method, route):
                refusals += (await send(eve, method, path, body, own)).status_code == 403
        assert rows(tmp_path) == before
        assert refusals > 20
        assert (await eve.shown(f"training_runs/{own['model']}"))["model_owner"] == "bob"
        assert await eve.result(f"{own['model']}/0") == {"model_id": ""}


async def test_an_admin_manages_what_all_have(server: Served) -> None:
    texts = [add_key(server.store, key("bob")), add_key(server.store, key("root", role="admin"))]
    async with speaking(server, texts[0]) as bob, speaking(server, texts[1]) as root:
        run = (await belongings(bob))["model"]
        assert (await root.shown(f"training_runs/{run}"))["model_owner"] == "bob"
        assert (await root.shown("training_runs"))["training_runs"] == []
        found = await root.shown("training_runs?access_scope=accessible")
        assert [each["training_run_id"] for each in found["training_runs"]] == [run]
        place = f"{PREFIX}/training_runs/{run}/checkpoints/weights/kept"
        assert (await root.client.delete(place)).status_code == 200
        for wanted, count in (({"type": "own"}, 0), ({"type": "accessible"}, 2)):
            found = await root.answer("sessions/search", {"owner": wanted})
            assert [each["owner"] for each in found["sessions"]] == ["bob"] * count


async def test_others_read_what_is_published_and_change_it_no_more_than_before(server: Served) -> None:
    texts = [add_key(server.store, key(name)) for name in ("alice", "bob")]
    async with speaking(server, texts[0]) as alice, speaking(server, texts[1]) as bob:
        run, own = (await belongings(bob))["model"], await belongings(alice)
        places = {kind: f"{PREFIX}/training_runs/{run}/checkpoints/{kind}/kept" for kind in KINDS}
        info = {"tinker_path": f"tinker://{run}/weights/kept"}
        assert "there is no model" in await alice.refusal("weights_info", info, 404)
        for place in places.values():
            assert (await bob.client.post(f"{place}/publish")).status_code == 200
        assert (await alice.answer("weights_info", info))["base_model"] == "tiny"
        sampler = {"sampling_session_seq_id": 9, "model_path": f"tinker://{run}/sampler_weights/kept"}
        made = await alice.answer("create_sampling_session", {"session_id": own["session"]} | sampler)
        asked = {"sampling_session_id": made["sampling_session_id"], "seq_id": 1, "num_samples": 1}
        asked |= {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        assert (await alice.post("asample", asked)).status_code == 503  # there is no engine, so it has passed
        load = {"session_id": own["session"], "model_seq_id": 5, "path": info["tinker_path"], "optimizer": False}
        await alice.answer("load_weights", load)
        assert (await alice.client.get(f"{places['external_weights']}/external_weights_urls")).status_code == 200
        copied = {"source_path": info["tinker_path"], "destination_project_id": "p"}
        path = (await alice.answer("copy_weights", copied))["tinker_path"]
        assert alice.store.require_checkpoint(path).tenant == "alice"
        assert path in json.dumps(await alice.shown("checkpoints"))
        for method, end in (("DELETE", ""), ("DELETE", "/publish"), ("POST", "/publish"), ("PUT", "/ttl")):
            reply = await alice.client.request(method, places["weights"] + end, json={"ttl_seconds": None})
            assert "there is no model" in refused(reply, 404)
        for kind in ("weights", "sampler_weights"):
            await bob.client.delete(f"{places[kind]}/publish")
        assert "there is no model" in await alice.refusal("weights_info", info, 404)
        assert "there is no model" in await alice.refusal("asample", asked, 404)
        await bob.client.delete(places["sampler_weights"])
        bob.save(f"tinker://{run}/sampler_weights/kept", tenant="bob")
        assert "there is no model" in await alice.refusal("asample", asked, 404)


async def test_copies_of_two_tenants_with_the_same_idempotency_key_are_two(server: Served) -> None:
    server.save("tinker://imported/weights/a", public=True)
    paths = set()
    for name in ("alice", "bob"):
        async with speaking(server, add_key(server.store, key(name))) as client:
            body = {"source_path": "tinker://imported/weights/a", "destination_project_id": "p"}
            for _ in range(2):
                copy = await client.answer("copy_weights", body, headers={"X-Idempotency-Key": "same"})
                paths.add(copy["tinker_path"])
    assert len(paths) == 2


async def test_a_model_never_loads_a_checkpoint_of_another_tenant(server: Served) -> None:
    """Older clients load into a model that is there: the path is read by the engine, which knows no tenants."""
    texts = [add_key(server.store, key(name)) for name in ("alice", "bob")]
    async with speaking(server, texts[0]) as alice, speaking(server, texts[1]) as bob:
        foreign, own = await belongings(bob), await belongings(alice)
        for seq_id, run in enumerate((foreign["model"], absent()["model"]), 1):
            body = {"model_id": own["model"], "seq_id": seq_id, "path": f"tinker://{run}/weights/kept"}
            await alice.answer("load_weights", body | {"optimizer": True})
        queued = [command for command in alice.queued() if command.model_id == own["model"]]
        assert [command.kind for command in queued] == ["rejected", "rejected"]
        for command in queued:
            assert b"there is no model" in alice.store.payload(command)


async def test_what_takes_long_ends_with_its_key(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that comes slowly, and a poll that waits."""
    monkeypatch.setattr(tenants, "_STALE_S", 0.0)
    text = add_key(server.store, key("alice"))
    async with speaking(server, text) as alice:
        model, sampler = await alice.new_run(), await alice.new_sampler()
        await alice.step(model, 1)
        poll = asyncio.create_task(alice.post("retrieve_future", {"request_id": f"{model}/1"}))
        reports = asyncio.create_task(alice.post("retrieve_futures", {"target": {"sampling_session_id": sampler}}))
        revoked = asyncio.Event()

        async def slowly(body: bytes) -> AsyncIterator[bytes]:
            yield body[:5]
            await revoked.wait()
            yield body[5:]

        json_type, step = {"Content-Type": "application/json"}, {"model_id": model, "seq_id": 2, "adam_params": {}}
        bodies = [
            ("optim_step", json.dumps(step).encode(), json_type),
            ("create_session", json.dumps({"sdk_version": "0.38.0"}).encode(), json_type),
            ("get_info", json.dumps({"model_id": model}).encode(), json_type),
            ("copy_weights", json.dumps({"source_path": f"tinker://{model}/weights/a"}).encode(), json_type),
            ("forward_backward", forward_backward_body(model, 3), PROTOBUF),
        ]
        sent = [
            asyncio.create_task(alice.client.post(f"{PREFIX}/{path}", content=slowly(body), headers=headers))
            for path, body, headers in bodies
        ]
        await asyncio.sleep(0.2)
        revoke_key(server.store, "alice")
        revoked.set()
        alice.end(f"{model}/1")
        for reply in await asyncio.gather(poll, reports, *sent):
            assert "needs an API key" in refused(reply, 401)


async def test_only_a_living_key_is_let_in(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await server.get("status")).status_code == 200  # while there are none
    monkeypatch.setattr(tenants, "_FRESH_S", 0.0)
    monkeypatch.setattr(tenants, "_STALE_S", 0.0)
    text = add_key(server.store, key("alice"))
    late = add_key(server.store, key("late", expires_at=time.time() - 1))

    async def status(**headers: str) -> int:
        return (await server.client.get(f"{PREFIX}/training_runs", headers=headers)).status_code

    (stored, _) = list_keys(server.store)
    wrong = text[:-1] + ("a" if text[-1] != "a" else "b")
    prefix = f"tml-{stored.key_id}"
    for sent in ("", "tml-", "tml-anything", wrong, text.upper(), prefix, f"{prefix}-", late):
        assert await status(**{"X-API-Key": sent}) == 401, sent
    assert await status() == 401
    assert await status(Authorization=f"Bearer {text}") == 200
    for path in ("livez", "readyz", "healthz"):
        assert (await server.get(path)).status_code in (200, 503)
    rotated = rotate_key(server.store, "alice")
    assert [await status(**{"X-API-Key": sent}) for sent in (text, rotated)] == [401, 200]
    revoke_key(server.store, "alice")
    assert await status(**{"X-API-Key": rotated}) == 401
    run_sql(tmp_path, "DELETE FROM api_keys")
    assert await status() == 401  # nobody is let in by a table that lost its rows


def test_a_key_is_kept_as_a_digest(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path)) as store:
        text = add_key(store, key("alice"))
        assert all(text[-20:].encode() not in file.read_bytes() for file in tmp_path.glob(f"{FILE_NAME}*"))
        assert list_keys(store)[0].digest == hashlib.sha256(text.encode()).digest()


async def test_sessions_belong_to_the_tenant_and_project_of_their_key(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path)) as store:
        text = add_key(store, key("alice", project_id="vision"))
    async with served(tmp_path) as again, speaking(again, text) as alice:
        session = await alice.new_session()
        found = await alice.answer("sessions/search", {"session_id": session})
        assert [(each["owner"], each["project_id"]) for each in found["sessions"]] == [("alice", "vision")]


async def test_an_upload_is_finished_by_its_tenant_alone(server: Served) -> None:
    texts = [add_key(server.store, key(name)) for name in ("alice", "bob")]
    async with speaking(server, texts[0]) as alice, speaking(server, texts[1]) as bob:
        begun = await alice.answer("external_weights_upload_start", {"base_model": "tiny", "lora_config": {"rank": 4}})
        asked = {"upload_id": begun["upload_id"]}
        foreign = await bob.refusal("external_weights_upload_finish", asked, 404)
        absent = await bob.refusal("external_weights_upload_finish", {"upload_id": "0" * 32}, 404)
        assert foreign.replace(begun["upload_id"], "0" * 32) == absent
        assert "is not there" in await alice.refusal("external_weights_upload_finish", asked, 400)


async def test_what_a_key_allows_holds_for_the_files_of_uploads(server: Served) -> None:
    text = add_key(server.store, key("alice", storage_bytes=1000, project_id="vision"))
    async with speaking(server, text) as alice:
        begun = await alice.answer("external_weights_upload_start", {"base_model": "tiny", "lora_config": {"rank": 4}})
        assert server.front.uploads.require(begun["upload_id"]).project_id == "vision"
        config, weights = begun["urls"].values()
        assert (await server.client.put(config, content=bytes(600))).status_code == 200
        reply = await server.client.put(weights, content=bytes(600))
        assert (reply.status_code, "the key allows 1,000 more" in reply.text) == (429, True)
        assert (await server.client.put(weights, content=bytes(400))).status_code == 200


async def test_the_disk_that_takes_an_upload_keeps_nobody_waiting(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, sync = [], disk.sync

    def noted(path: Path) -> None:
        threads.append(threading.get_ident())
        sync(path)

    begun = await server.answer("external_weights_upload_start", {"base_model": "tiny", "lora_config": {"rank": 4}})
    monkeypatch.setattr(disk, "sync", noted)
    for url in begun["urls"].values():
        assert (await server.client.put(url, content=b"{}")).status_code == 200
    assert len(threads) == 4
    assert threading.get_ident() not in threads
