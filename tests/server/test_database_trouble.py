"""A database that is locked or away: replies say so and when to come back, and no operation is called failed."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.server.saving import new_run, save
from tests.server.serving import Served, served
from tests.server.test_checkpoints import url
from tests.server.test_engine_process import LONG_S, Watched, until
from tinsmith.errors import ConfigError, StoreUnavailableError
from tinsmith.store.database import FILE_NAME
from tinsmith.store.store import Store


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Another connection holds the lock, as a backup does."""
    other = sqlite3.connect(data_dir / FILE_NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


async def test_requests_that_the_database_does_not_take_are_to_be_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store.open(tmp_path, busy_s=0.05)
    monkeypatch.setattr("tests.server.serving.Store.open", lambda data_dir: opened)

    async with served(tmp_path) as server:
        session_id = await server.new_session()
        model_id = await server.new_model(session_id)
        step = {"model_id": model_id, "seq_id": 1, "adam_params": {}}
        with locked(tmp_path):
            for path, body in (("optim_step", step), ("create_session", {})):
                reply = await server.post(path, body)
                assert reply.status_code == 503
                assert reply.headers["retry-after"] == "1"
                assert "database is locked (SQLITE_BUSY); another program has locked it" in reply.json()["detail"]
            assert (await server.post("session_heartbeat", {"session_id": session_id})).status_code == 200
        assert (await server.post("optim_step", step)).json()["request_id"] == f"{model_id}/1"
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
        reply = await server.client.get("/api/v1/healthz")
        assert reply.status_code == status, reply.text
        assert ("DATA_DIR/tinsmith.db is damaged: " in reply.json().get("detail", "")) == (status == 503)


async def test_health_tells_of_a_database_that_was_deleted_and_no_checkpoint_is_changed(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.hub.engine, "state", "ready")
    path = f"tinker://{await new_run(server)}/weights/a"
    save(server, path)
    (tmp_path / FILE_NAME).unlink()
    refused = await server.client.delete(url(path))
    health = await server.client.get("/api/v1/healthz")
    for reply in (refused, health):
        assert reply.status_code == 503
        assert "the database DATA_DIR/tinsmith.db is gone (No such file or directory) while the server runs" in reply.json()["detail"]
    assert not (tmp_path / FILE_NAME).exists()


async def test_a_poll_waits_while_the_database_cannot_be_read(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    request_id = f"{await server.new_model(await server.new_session())}/0"
    server.hub.waiters.look_again(request_id)
    server.hub.config.server.long_poll_s = 0.1
    with monkeypatch.context() as patch:
        patch.setattr(Store, "outcome", _unavailable)
        reply = await server.post("retrieve_future", {"request_id": request_id})
    assert reply.status_code == 408


def _unavailable(*_: object) -> None:
    raise StoreUnavailableError("the database takes nothing at the moment")


async def test_the_server_outlives_an_engine_that_ends_while_the_database_is_locked() -> None:
    class Away(Watched):
        """A database that takes the news of an absent engine at the third attempt."""

        async def absent(self, reason: str) -> None:
            await super().absent(reason)
            if len(self.absences) < 3:
                _unavailable()

    watched = Away()
    running = asyncio.create_task(watched.engine.run())
    await until(lambda: watched.engine.is_ready)
    assert watched.absences == ["the server was restarted"] * 3
    await watched.engine.stop()
    async with asyncio.timeout(LONG_S):
        await running
