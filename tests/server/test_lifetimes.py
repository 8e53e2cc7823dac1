"""Sessions and results end by themselves.

Invariant: Sessions that go away leave their models as checkpoints; results live as long as promised.
Also: `tests/acceptance/test_checkpoints.py`.

Invariant: A clock that is set ends no session and keeps no sample waiting.
Also: `tests/server/test_sampling.py`.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.serving import LIGHT_ENGINE, Served, running, served
from tests.server.test_engine_process import no_outcome
from tinsmith.config import Config, ServerConfig
from tinsmith.errors import EngineUnavailableError, StoreUnavailableError
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.lifetimes import keep_up
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store


def config(session_idle_s: float = 600.0, result_ttl_s: float = 86400.0) -> Config:
    return Config(server=ServerConfig(session_idle_s=session_idle_s, result_ttl_s=result_ttl_s))


async def finish(server: Served, model_id: str, seq_id: int) -> str:
    request_id = f"{model_id}/{seq_id}"
    server.finish(Outcome(request_id, b'{"metrics":{}}', "json", None, None))
    return request_id


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the monotonic clock forward by so many seconds."""
    clock = time.monotonic
    passed = 0.0

    def forward(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed)
    return forward


async def ended_now(server: Served) -> list[str]:
    """The sessions that one round ends."""
    return [session_id async for session_id in server.hub.lifetimes.end_idle_sessions()]


async def test_a_session_lives_as_long_as_it_shows_itself(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    async with served(tmp_path, config(session_idle_s=4000.0)) as server:
        beating, asking, silent = [await server.new_session() for _ in range(3)]
        model_id = await server.new_model(asking)
        ended = await ended_now(server)
        for seq_id in range(1, 7):
            pass_time(1000)
            await server.post("session_heartbeat", {"session_id": beating, "type": "session_heartbeat"})
            await server.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
            ended += await ended_now(server)
        assert ended == [silent]
        assert (await server.post("session_heartbeat", {"session_id": silent, "type": "session_heartbeat"})).status_code == 410
        assert (await server.post("session_heartbeat", {"session_id": beating, "type": "session_heartbeat"})).status_code == 200


async def test_a_server_that_just_started_ends_nothing(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    async with served(tmp_path) as server:
        session_id = await server.new_session()
    pass_time(3000)
    async with served(tmp_path, config(session_idle_s=2000.0)) as server:
        assert await ended_now(server) == []
        pass_time(2001)
        assert await ended_now(server) == [session_id]


async def test_a_clock_that_is_set_ends_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time

    async with served(tmp_path, config(session_idle_s=60.0)) as server:
        session_id = await server.new_session()
        assert await ended_now(server) == []
        await server.post("session_heartbeat", {"session_id": session_id, "type": "session_heartbeat"})
        monkeypatch.setattr(time, "time", lambda: clock() + 3600)
        assert await ended_now(server) == []
        monkeypatch.setattr(time, "time", lambda: clock() - 3600)
        later = time.monotonic() + 61
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert await ended_now(server) == [session_id]


async def test_a_session_that_cannot_be_unloaded_keeps_up_no_other(tmp_path: Path) -> None:
    """The first `on_session_end` of a round raises; the rest of the list, and the rest of the round, come about."""
    async with served(tmp_path, config(session_idle_s=0.2)) as server:
        sessions = {await server.new_session() for _ in range(3)}
        told: list[str] = []
        all_told = asyncio.Event()

        async def on_session_end(session_id: str) -> None:
            told.append(session_id)
            if len(told) == len(sessions):
                all_told.set()
            raise EngineUnavailableError("the engine is not connected")

        rounds = asyncio.create_task(keep_up(server.hub.lifetimes, on_session_end))
        async with asyncio.timeout(60):
            await all_told.wait()
        rounds.cancel()
        assert set(told) == sessions


async def test_a_session_that_has_ended_is_unloaded_though_the_next_cannot_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is locked from the second on: the first is over, and no later round would find it."""
    finish_session, finished = Store.finish_session, list[str]()

    def finish_one(store: Store, session_id: str, status: str, detail: str | None) -> bool:
        if finished:
            raise StoreUnavailableError("the database is locked")
        finished.append(session_id)
        return finish_session(store, session_id, status, detail)

    async with served(tmp_path, config(session_idle_s=0.2)) as server:
        for _ in range(2):
            await server.new_session()
        told: asyncio.Queue[str] = asyncio.Queue()
        monkeypatch.setattr(Store, "finish_session", finish_one)
        rounds = asyncio.create_task(keep_up(server.hub.lifetimes, told.put))
        async with asyncio.timeout(60):
            assert await told.get() == finished[0]
        rounds.cancel()


async def test_an_engine_is_told_of_the_sessions_that_ended_before_it_was_ready(server: Served) -> None:
    """Their commands may be in the log: it would load their models and never unload them."""
    hub = server.hub
    finished = await server.new_session()
    await server.post(f"sessions/{finished}/finish", {"reason": {"type": "success"}})
    await hub.end_session("idle", save=True)
    hub.engine = EngineProcess(hub.config, hub.take, hub.engine_ready, hub.engine_absent, LIGHT_ENGINE)
    polls = [asyncio.create_task(hub.waiters.wait_for(f"ended {session_id}", no_outcome, 120.0)) for session_id in (finished, "idle")]
    async with running(hub.engine):
        told = [await poll for poll in polls]
    assert [outcome.error for outcome in told if isinstance(outcome, Outcome)] == ["False", "True"]


async def test_results_are_kept_for_their_time_or_until_their_session_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, passed = time.time, 0.0
    monkeypatch.setattr(time, "time", lambda: clock() + passed)
    async with served(tmp_path, config(result_ttl_s=100_000.0)) as server:
        session_id = await server.new_session()
        model_id = await server.new_model(session_id)
        first = await finish(server, model_id, 0)
        await server.hub.lifetimes.drop_results()
        assert (await server.post("retrieve_future", {"request_id": first})).json() == {"metrics": {}}
        passed += 100_001
        await server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        second = await finish(server, model_id, 1)
        await server.hub.lifetimes.drop_results()
        gone = await server.post("retrieve_future", {"request_id": first})
        assert (gone.status_code, "is not kept any more" in gone.json()["detail"]) == (410, True)
        assert (await server.post("retrieve_future", {"request_id": second})).status_code == 200
        again = await server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
        assert again.json()["request_id"] == second
        await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
        await server.hub.lifetimes.drop_results()
        assert (await server.post("retrieve_future", {"request_id": second})).status_code == 200
        passed += server.hub.lifetimes.round_s + 1
        await server.hub.lifetimes.drop_results()
        assert (await server.post("retrieve_future", {"request_id": second})).status_code == 410


async def test_a_snapshot_is_sampled_after_the_result_of_its_save_is_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path, config(result_ttl_s=1.0)) as server:
        model_id = await server.new_model(await server.new_session())
        await server.post("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0})
        sampler = f"{model_id.partition(':')[0]}:sample:0"
        assert (await server.client.get(f"/api/v1/samplers/{sampler}")).status_code == 404
        await finish(server, model_id, 1)
        await server.hub.store.write(Store.drop_results, time.time() + 1, 0.0)
        assert (await server.client.get(f"/api/v1/samplers/{sampler}")).status_code == 200
