"""Routes that list, search and describe sessions."""

from datetime import datetime
from typing import Any

import pytest

from tests.server.serving import Served
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")


async def found(server: Served, **asked: object) -> list[str]:
    return [session["session_id"] for session in (await server.answer("sessions/search", asked))["sessions"]]


async def test_a_session_names_its_runs_and_samplers(server: Served) -> None:
    session_id = await server.new_session(user_metadata={"team": "a", "n": 1}, display_name="nightly run")
    runs = [await server.new_run(session_id, model_seq_id=number) for number in (1, 0)]
    sampler = await server.new_sampler(session_id=session_id)
    assert await server.shown(f"sessions/{session_id}?access_scope=owned") == {
        "training_run_ids": runs,
        "sampler_ids": [sampler],
        "user_metadata": {"team": "a", "n": "1"},
        "display_name": "nightly run",
    }
    empty: dict[str, Any] = {"training_run_ids": [], "sampler_ids": [], "user_metadata": None, "display_name": None}
    assert await server.shown(f"sessions/{await server.new_session()}") == empty
    assert (await server.get("sessions/x")).status_code == 404


async def test_sessions_are_paged_newest_first_without_gap_or_repeat(server: Served) -> None:
    ids = [await server.new_session() for _ in range(5)][::-1]
    for query, expected in (("", ids), ("?limit=2", ids[:2]), ("?limit=2&offset=4", ids[4:]), ("?offset=5", [])):
        assert await server.shown(f"sessions{query}") == {"sessions": expected}
    cursor: dict[str, Any] = {}
    pages = []
    for _ in range(3):
        reply = await server.answer("sessions/search", {"limit": 2} | cursor)
        pages.append([session["session_id"] for session in reply["sessions"]])
        cursor = {"cursor": reply.get("next_cursor")}
        await server.new_session()  # what comes meanwhile is newer than every page that follows
    assert (pages, cursor) == ([ids[:2], ids[2:4], ids[4:]], {"cursor": None})


async def test_a_session_moves_into_a_project(server: Served) -> None:
    session_id = await server.new_session()
    model_id = await server.new_run(session_id)
    for project in ("default", "p", "q"):
        if project != "default":
            assert (
                await server.client.put(f"/api/v1/sessions/{session_id}/project", json={"project_id": project})
            ).status_code == 200
        assert await found(server, project_ids=[project]) == [session_id]
    assert await found(server, project_ids=["p", "default"]) == []
    runs = (await server.shown("training_runs?project_id=q"))["training_runs"]
    assert [described["training_run_id"] for described in runs] == [model_id]
    for path, project, status in (("x", "p", 404), (session_id, "", 400)):
        assert (
            await server.client.put(f"/api/v1/sessions/{path}/project", json={"project_id": project})
        ).status_code == status


async def test_a_search_combines_what_it_is_given(server: Served) -> None:
    a = await server.new_session(
        display_name="Nightly 100% dpo", user_metadata={"team": "x", "seed": 1}, project_id="p 4999"
    )
    b = await server.new_session(display_name="nightly sft", user_metadata={"team": "x"})
    c = await server.new_session()
    projects = [f"p {number}" for number in range(5000)]
    for asked, expected in (
        ({}, [c, b, a]),
        ({"display_name": "NIGHTLY"}, [b, a]),
        ({"display_name": "dpo night"}, [a]),
        ({"display_name": "0% d"}, [a]),
        ({"display_name": "_"}, []),
        ({"display_name": " "}, []),
        ({"display_name": " t" * 250}, [b, a]),
        ({"session_id": c}, [c]),
        ({"session_id": c, "display_name": "sft"}, [c, b]),
        ({"user_metadata": {"team": "x"}}, [b, a]),
        ({"user_metadata": {"team": "x", "seed": "1"}}, []),
        ({"user_metadata": {str(n): str(n) for n in range(100)}}, []),
        ({"project_ids": projects}, [a]),
        ({"project_ids": [*projects, "default"]}, [c, b, a]),
        ({"project_ids": []}, []),
        ({"owner": {"type": "accessible"}}, [c, b, a]),
        ({"owner": {"type": "user", "owner_urns": ["somebody"]}}, []),
        ({"owner": {"type": "user", "owner_urns": ["local"]}, "limit": 1}, [c]),
        ({"statuses": [{"type": "active"}] * 100}, [c, b, a]),
    ):
        assert await found(server, **asked) == expected, asked


async def test_a_search_knows_how_sessions_are_doing(server: Served) -> None:
    running, fine, errored, silent = [await server.new_session() for _ in range(4)]
    server.save(f"tinker://{await server.new_run(errored)}/weights/a")
    server.save(f"tinker://{errored}:train:0/weights/expired", expires_at=1.0)
    await server.end_session(fine)
    await server.end_session(errored, "errored", "KeyError")
    await server.hub.store.write(Store.finish_session, silent, "expired", "no sign of life")
    for statuses, expected in (
        ([{"type": "active"}], [running]),
        ([{"type": "client_finished"}], [errored, fine]),
        ([{"type": "client_finished", "reasons": ["errored", "interrupted"]}], [errored]),
        ([{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}], [fine, running]),
        ([{"type": "failed"}, {"type": "cancelled"}], []),
    ):
        assert await found(server, statuses=statuses) == expected
    summaries = {summary["session_id"]: summary for summary in (await server.answer("sessions/search", {}))["sessions"]}
    assert (summaries[running]["status"], summaries[silent]["status"]) == ({"type": "active"}, None)
    assert datetime.fromisoformat(summaries[errored].pop("created_at")).tzinfo is not None
    assert summaries[errored] == {
        "session_id": errored,
        "owner": "local",
        "project_id": "default",
        "status": {"type": "client_finished", "reason": {"type": "errored"}, "detail": "KeyError"},
        "checkpoints_count": 1,
        "checkpoint_storage_bytes": 10,
        "display_name": None,
        "user_metadata": None,
    }


async def test_a_search_that_means_nothing_is_refused(server: Served) -> None:
    nonsense: list[tuple[dict[str, object], str]] = [
        ({"limit": 201}, "limit"),
        ({"statuses": [{"type": "done"}]}, "statuses.0.type"),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "reasons belong to client_finished"),
        ({"owner": {"type": "user"}}, "owner_urns belong to type 'user'"),
        ({"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}}, "last_created_at"),
    ]
    for asked, complaint in nonsense:
        assert complaint in await server.refusal("sessions/search", asked)


@pytest.mark.parametrize("number", ["NaN", "1e999", '[{"y": [-Infinity]}]'])
async def test_metadata_that_is_no_json_is_refused(server: Served, number: str) -> None:
    for path, rest in (
        ("create_session", ""),
        ("create_model", ', "session_id": "s", "model_seq_id": 0, "base_model": "tiny"'),
        ("load_weights", ', "session_id": "s", "model_seq_id": 0, "path": "tinker://a/weights/b", "optimizer": false'),
    ):
        body, json_type = f'{{"user_metadata": {{"x": {number}}}{rest}}}', {"Content-Type": "application/json"}
        reply = await server.client.post(f"/api/v1/{path}", content=body, headers=json_type)
        assert (reply.status_code, "user_metadata: Value error, must hold finite numbers only" in reply.text) == (
            400,
            True,
        ), reply.text
