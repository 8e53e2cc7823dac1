"""Routes that list runs and checkpoints."""

import time
from datetime import datetime
from typing import Any

import pytest

from tests.server.serving import Served, refused
from tinsmith.store.records import Outcome

pytestmark = pytest.mark.usefixtures("database")


async def test_a_run_is_described_with_its_newest_checkpoints(server: Served) -> None:
    before = time.time()
    model_id = await server.new_run(base_model="tiny:peft:262144", user_metadata={"renderer_name": "qwen3"})
    server.save(f"tinker://{model_id}/weights/old", created_at=1.0)
    server.save(f"tinker://{model_id}/weights/new", created_at=2.0, expires_at=2.0**33, user_metadata={"step": "2"})
    server.save(f"tinker://{model_id}/weights/expired", created_at=3.0, expires_at=1.0)
    server.save(f"tinker://{model_id}/external_weights/e", created_at=4.0)
    described = await server.shown(f"training_runs/{model_id}?access_scope=accessible")
    assert before <= datetime.fromisoformat(described.pop("last_request_time")).timestamp() <= time.time()
    assert described == {
        "training_run_id": model_id,
        "base_model": "tiny",
        "model_owner": "local",
        "is_lora": True,
        "status": "ready",
        "corrupted": False,
        "lora_rank": 8,
        "last_checkpoint": {
            "base_model": "tiny",
            "checkpoint_id": "weights/new",
            "checkpoint_type": "training",
            "time": "1970-01-01T00:00:02+00:00",
            "tinker_path": f"tinker://{model_id}/weights/new",
            "size_bytes": 10,
            "public": False,
            "expires_at": "2242-03-16T12:56:32+00:00",
            "user_metadata": {"step": "2"},
        },
        "last_sampler_checkpoint": None,
        "user_metadata": {"renderer_name": "qwen3"},
    }


async def test_full_weights_metadata_of_any_json_and_what_could_not_be_created_are_described(server: Served) -> None:
    model_id = await server.new_model(lora_config={"rank": 0}, user_metadata={"a": {"b": [1]}, "c": "d"})
    server.finish(Outcome(f"{model_id}/0", None, None, "out of memory", "server"))
    described = await server.shown(f"training_runs/{model_id}")
    assert (described["is_lora"], described["lora_rank"], described["corrupted"]) == (False, None, True)
    assert described["user_metadata"] == {"a": '{"b": [1]}', "c": "d"}


async def test_runs_are_paged_newest_first_and_by_project(server: Served) -> None:
    runs = [await server.new_run() for _ in range(3)]
    runs.append(await server.new_run(await server.new_session(project_id="p")))
    for query, expected, cursor in (
        ("", runs[::-1], {"offset": 0, "limit": 20, "total_count": 4}),
        ("?limit=2&offset=1", [runs[2], runs[1]], {"offset": 1, "limit": 2, "total_count": 4}),
        ("?offset=9", [], {"offset": 9, "limit": 20, "total_count": 4}),
        ("?project_id=p", [runs[3]], {"offset": 0, "limit": 20, "total_count": 1}),
        ("?project_id=q", [], {"offset": 0, "limit": 20, "total_count": 0}),
    ):
        page = await server.shown(f"training_runs{query}")
        assert ([found["training_run_id"] for found in page["training_runs"]], page["cursor"]) == (expected, cursor)


async def test_checkpoints_of_one_run_and_of_all_are_listed_newest_first(server: Served) -> None:
    a, b = [await server.new_run() for _ in range(2)]
    paths = [
        f"tinker://{a}/weights/x",
        f"tinker://{b}/weights/x",
        f"tinker://{a}/sampler_weights/x",
        "tinker://imported/weights/x",
    ]
    for at, path in enumerate(paths):
        server.save(path, created_at=float(at))
    server.save(f"tinker://{a}/weights/expired", expires_at=1.0)
    for query, expected in (
        (f"training_runs/{a}/checkpoints", [paths[2], paths[0]]),
        ("training_runs/imported/checkpoints", [paths[3]]),
        ("checkpoints", paths[::-1]),
        ("checkpoints?limit=1&offset=1", [paths[2]]),
    ):
        page = await server.shown(query)
        assert [checkpoint["tinker_path"] for checkpoint in page["checkpoints"]] == expected
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": 4}


async def test_checkpoints_are_searched_page_by_page(server: Served) -> None:
    a, b = await server.new_run(), await server.new_run(await server.new_session(project_id="p"))
    paths = [f"tinker://{run}/{kind}/x" for run in (a, b) for kind in ("weights", "sampler_weights")]
    for at, path in enumerate(paths):
        server.save(path, created_at=float(at // 2), user_metadata={"step": str(at)})
    server.save(f"tinker://{a}/weights/expired", expires_at=1.0)
    for wanted, expected in (
        ({}, [paths[2], paths[3], paths[0], paths[1]]),
        ({"project_ids": ["p"]}, paths[2:]),
        ({"project_ids": ["q"]}, []),
        ({"checkpoint_type": "sampler"}, [paths[3], paths[1]]),
        ({"user_metadata": {"step": "1"}}, [paths[1]]),
        ({"user_metadata": {"step": "9"}}, []),
        ({"base_models": ["tiny"]}, [paths[2], paths[3], paths[0], paths[1]]),
        ({"base_models": ["other"]}, []),
        ({"owner": {"type": "user", "owner_urns": ["nobody"]}}, []),
    ):
        for limit in (1, 3, 200):
            found: list[str] = []
            cursor: dict[str, Any] = {}
            for _ in range(9):
                page = await server.answer("checkpoints/search", wanted | {"limit": limit} | cursor)
                assert len(page["checkpoints"]) <= limit
                found += [checkpoint["tinker_path"] for checkpoint in page["checkpoints"]]
                if "next_cursor" not in page:
                    break
                cursor = {"cursor": page["next_cursor"]}
            assert found == expected, wanted


async def test_what_cannot_be_listed_is_refused(server: Served) -> None:
    for path, status, complaint in (
        ("training_runs/x", 404, "training run 'x' does not exist"),
        ("training_runs/x/checkpoints", 404, "training run 'x' does not exist"),
        ("training_runs?limit=1001", 400, "limit: Input should be less than or equal to 1000"),
        ("training_runs?offset=9223372036854775808", 400, "offset: "),
        ("training_runs?access_scope=mine", 400, "access_scope: Input should be 'owned' or 'accessible', got 'mine'"),
        ("training_runs?page=2", 400, "page: Extra inputs are not permitted"),
    ):
        assert complaint in refused(await server.get(path), status)
