"""A database that is locked or away: replies say so and when to come back, and no operation is called failed."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.databases import locked
from tests.server.serving import Served, served, step
from tinsmith.errors import ConfigError, StoreUnavailableError
from tinsmith.store.sqlite import FILE_NAME
from tinsmith.store.store import Store


@pytest.mark.usefixtures("database")
async def test_requests_that_the_database_does_not_take_are_to_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Store.open(tmp_path, busy_s=0.05)
    monkeypatch.setattr("tests.server.serving.Store.open", lambda data_dir: opened)
    async with served(tmp_path) as server:
        session_id = await server.new_session()
        model_id = await server.new_model(session_id)
        with locked(tmp_path):  # as a backup does
            for path, body in (("optim_step", step(model_id, 1)), ("create_session", {})):
                reply = await server.post(path, body)
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                assert "; another program has locked it" in reply.json()["detail"]
            assert await server.heartbeat(session_id) == 200
        assert await server.step(model_id, 1) == f"{model_id}/1"
        assert server.store.status(f"{model_id}/1") == "queued"


async def test_health_tells_of_a_damaged_database_until_it_is_sound(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.hub.engine, "state", "ready")
    for number in range(200):
        server.store.create_session(f"s{number}", {"tags": ["x" * 500], "user_metadata": None, "sdk_version": "1"})
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    sound = (tmp_path / FILE_NAME).read_bytes()
    for content, status in ((sound, 200), (sound[:8192] + bytes(20000) + sound[28192:], 503), (sound, 200)):
        (tmp_path / FILE_NAME).write_bytes(content)
        server.hub.lifetimes._check_at = 0.0
        with suppress(ConfigError):
            await server.hub.lifetimes.check_database()
        reply = await server.get("healthz")
        assert reply.status_code == status, reply.text
        assert ("DATA_DIR/tinsmith.db is damaged: " in reply.json().get("detail", "")) == (status == 503)


async def test_health_tells_of_a_database_that_was_deleted_and_no_checkpoint_is_changed(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.hub.engine, "state", "ready")
    run = await server.new_run()
    server.save(f"tinker://{run}/weights/a")
    (tmp_path / FILE_NAME).unlink()
    for reply in (
        await server.client.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/a"),
        await server.get("healthz"),
    ):
        assert reply.status_code == 503
        assert (
            "the database DATA_DIR/tinsmith.db is gone (No such file or directory) while the server runs"
            in reply.json()["detail"]
        )
    assert not (tmp_path / FILE_NAME).exists()


async def test_a_poll_waits_while_the_database_cannot_be_read(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise StoreUnavailableError("the database takes nothing at the moment")

    request_id = f"{await server.new_model()}/0"
    server.hub.waiters.look_again(request_id)
    server.hub.config.server.long_poll_s = 0.1
    with monkeypatch.context() as patch:
        patch.setattr(Store, "outcome", unavailable)
        assert (await server.post("retrieve_future", {"request_id": request_id})).status_code == 408
