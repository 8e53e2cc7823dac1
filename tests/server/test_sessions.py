"""Routes that list, search and describe sessions."""

from datetime import datetime
from typing import Any

import pytest

from tests.server.saving import new_run, save
from tests.server.serving import Served
from tinsmith.store.store import Store


async def create(server: Served, **description: object) -> str:
    """A session; returns its id."""
    body = {"tags": [], "sdk_version": "0.38.0", "type": "create_session"} | description
    session_id: str = (await server.post("create_session", body)).json()["session_id"]
    return session_id


async def found(server: Served, **asked: object) -> list[str]:
    """The ids that a search finds."""
    reply = await server.post("sessions/search", asked)
    assert reply.status_code == 200, reply.text
    return [session["session_id"] for session in reply.json()["sessions"]]


async def test_a_session_names_its_runs_and_samplers(server: Served) -> None:
    session_id = await create(server, user_metadata={"team": "a", "n": 1}, display_name="nightly run")
    runs = [await new_run(server, session_id, model_seq_id=number) for number in (1, 0)]
    body = {"session_id": session_id, "sampling_session_seq_id": 4, "base_model": "tiny"}
    sampler_id = (await server.post("create_sampling_session", body)).json()["sampling_session_id"]
    described = (await server.client.get(f"/api/v1/sessions/{session_id}?access_scope=owned")).json()
    assert described == {
        "training_run_ids": runs,
        "sampler_ids": [sampler_id],
        "user_metadata": {"team": "a", "n": "1"},
        "display_name": "nightly run",
    }
    empty = (await server.client.get(f"/api/v1/sessions/{await create(server)}")).json()
    assert empty == {"training_run_ids": [], "sampler_ids": [], "user_metadata": None, "display_name": None}
    unknown = await server.client.get("/api/v1/sessions/x")
    assert (unknown.status_code, unknown.json()["detail"]) == (404, "session 'x' does not exist")


async def test_sessions_are_paged_newest_first(server: Served) -> None:
    ids = [await create(server) for _ in range(3)][::-1]
    for query, expected in (("", ids), ("?limit=2", ids[:2]), ("?limit=2&offset=2", ids[2:]), ("?offset=3", [])):
        assert (await server.client.get(f"/api/v1/sessions{query}")).json() == {"sessions": expected}


async def test_a_session_moves_into_a_project(server: Served) -> None:
    session_id = await create(server)
    model_id = await new_run(server, session_id)
    assert await found(server, project_ids=["default"]) == [session_id]
    for project in ("p", "q"):
        moved = await server.client.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": project})
        assert moved.status_code == 200
        assert await found(server, project_ids=[project]) == [session_id]
    assert await found(server, project_ids=["p", "default"]) == []
    runs = (await server.client.get("/api/v1/training_runs?project_id=q")).json()["training_runs"]
    assert [described["training_run_id"] for described in runs] == [model_id]
    assert (await server.client.put("/api/v1/sessions/x/project", json={"project_id": "p"})).status_code == 404
    assert (await server.client.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": ""})).status_code == 400


async def test_a_search_combines_what_it_is_given(server: Served) -> None:
    a = await create(server, display_name="Nightly 100% dpo", user_metadata={"team": "x", "seed": 1}, project_id="p")
    b = await create(server, display_name="nightly sft", user_metadata={"team": "x"})
    c = await create(server)
    for asked, expected in (
        ({}, [c, b, a]),
        ({"display_name": "NIGHTLY"}, [b, a]),
        ({"display_name": "dpo night"}, [a]),
        ({"display_name": "0% d"}, [a]),
        ({"display_name": "_"}, []),
        ({"display_name": " "}, []),
        ({"session_id": c}, [c]),
        ({"session_id": c, "display_name": "sft"}, [c, b]),
        ({"user_metadata": {"team": "x"}}, [b, a]),
        ({"user_metadata": {"team": "x", "seed": "1"}}, []),
        ({"project_ids": ["p"]}, [a]),
        ({"project_ids": ["p", "default"]}, [c, b, a]),
        ({"project_ids": []}, []),
        ({"owner": {"type": "accessible"}}, [c, b, a]),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
        ({"owner": {"type": "user", "owner_urns": ["local"]}, "limit": 1}, [c]),
    ):
        assert await found(server, **asked) == expected, asked


async def test_a_search_knows_how_sessions_are_doing(server: Served) -> None:
    running, fine, errored, silent = [await create(server) for _ in range(4)]
    save(server, f"tinker://{await new_run(server, errored)}/weights/a")
    await server.post(f"sessions/{fine}/finish", {"reason": {"type": "success"}, "detail": None})
    await server.post(f"sessions/{errored}/finish", {"reason": {"type": "errored"}, "detail": "KeyError"})
    await server.hub.store.write(Store.finish_session, silent, "expired", "no sign of life")
    for statuses, expected in (
        ([{"type": "active"}], [running]),
        ([{"type": "client_finished"}], [errored, fine]),
        ([{"type": "client_finished", "reasons": ["errored", "interrupted"]}], [errored]),
        ([{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}], [fine, running]),
        ([{"type": "failed"}, {"type": "cancelled"}], []),
    ):
        assert await found(server, statuses=statuses) == expected
    save(server, f"tinker://{errored}:train:0/weights/expired", expires_at=1.0)
    summaries = {s["session_id"]: s for s in (await server.post("sessions/search", {})).json()["sessions"]}
    assert summaries[running]["status"] == {"type": "active"}
    assert summaries[silent]["status"] is None
    finished = summaries[errored]
    assert datetime.fromisoformat(finished.pop("created_at")).tzinfo is not None
    assert finished == {
        "session_id": errored,
        "owner": "local",
        "project_id": "default",
        "status": {"type": "client_finished", "reason": {"type": "errored"}, "detail": "KeyError"},
        "checkpoints_count": 1,
        "checkpoint_storage_bytes": 10,
        "display_name": None,
        "user_metadata": None,
    }


async def test_pages_of_a_search_follow_each_other_without_gap_or_repeat(server: Served) -> None:
    ids = [await create(server) for _ in range(5)][::-1]
    cursor: dict[str, Any] = {}
    pages = []
    for _ in range(3):
        reply = (await server.post("sessions/search", {"limit": 2} | cursor)).json()
        pages.append([session["session_id"] for session in reply["sessions"]])
        cursor = {"cursor": reply.get("next_cursor")}
        await create(server)  # what comes meanwhile is newer than every page that follows
    assert pages == [ids[:2], ids[2:4], ids[4:]]
    assert cursor == {"cursor": None}


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"limit": 201}, "limit"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "done"}]}, "statuses.0.type"),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "reasons belong to client_finished"),
        ({"owner": {"type": "user"}}, "owner_urns belong to type 'user'"),
        ({"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}}, "last_created_at"),
        ({"user_metadata": {"a": 1}}, "user_metadata.a"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_a_search_that_means_nothing_is_refused(asked: dict[str, object], complaint: str, server: Served) -> None:
    reply = await server.post("sessions/search", asked)
    assert (reply.status_code, complaint in reply.json()["detail"]) == (400, True), reply.text


async def test_a_search_takes_thousands_of_projects_and_as_many_words_as_there_may_be(server: Served) -> None:
    a, b = await create(server, project_id="p 4999"), await create(server, display_name="x" * 9, user_metadata={"0": "0"})
    projects = [f"p {number}" for number in range(5000)]
    assert await found(server, project_ids=projects) == [a]
    assert await found(server, project_ids=[*projects, "default"]) == [b, a]
    assert await found(server, display_name=" x" * 250) == [b]
    assert await found(server, user_metadata={str(n): str(n) for n in range(100)}) == []
    assert await found(server, statuses=[{"type": "active"}] * 100) == [b, a]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", '[{"y": [NaN]}]'])
async def test_metadata_that_is_no_json_is_refused(server: Served, number: str) -> None:
    json_type = {"Content-Type": "application/json"}
    for path, rest in (
        ("create_session", ""),
        ("create_model", ', "session_id": "s", "model_seq_id": 0, "base_model": "tiny"'),
        ("load_weights", ', "session_id": "s", "model_seq_id": 0, "path": "tinker://a/weights/b", "optimizer": false'),
    ):
        body = f'{{"user_metadata": {{"x": {number}}}{rest}}}'
        reply = await server.client.post(f"/api/v1/{path}", content=body, headers=json_type)
        assert reply.status_code == 400, reply.text
        assert "user_metadata: Value error, must hold finite numbers only" in reply.json()["detail"]


async def test_metadata_that_an_older_version_took_does_not_stop_searches(server: Served) -> None:
    description: dict[str, Any] = {
        "tags": [],
        "user_metadata": {"x": float("nan")},
        "sdk_version": "",
        "project_id": None,
        "display_name": None,
    }
    await server.hub.store.write(Store.create_session, "old", description)
    new = await create(server, user_metadata={"team": "a"})
    assert await found(server, user_metadata={"team": "a"}) == [new]
    assert await found(server) == [new, "old"]
    assert (await server.client.get("/api/v1/sessions/old")).json()["user_metadata"] == {"x": "NaN"}
