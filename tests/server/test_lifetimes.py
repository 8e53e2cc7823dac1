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

from tests.server.serving import LIGHT_ENGINE, Served, refused, running, served
from tests.server.test_engine_process import no_outcome
from tinsmith.errors import EngineUnavailableError, StoreUnavailableError
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.lifetimes import keep_up
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let so many seconds pass, for both clocks."""
    passed, monotonic, clock = 0.0, time.monotonic, time.time

    def forward(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed)
    monkeypatch.setattr(time, "time", lambda: clock() + passed)
    return forward


async def ended_now(server: Served) -> list[str]:
    """The sessions that one round ends."""
    return [session_id async for session_id in server.hub.lifetimes.end_idle_sessions()]


async def test_a_session_lives_as_long_as_it_shows_itself(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    async with served(tmp_path, session_idle_s=4000.0) as server:
        beating, asking, silent = [await server.new_session() for _ in range(3)]
        model_id = await server.new_model(asking)
        ended = await ended_now(server)
        for seq_id in range(1, 7):
            pass_time(1000)
            await server.heartbeat(beating)
            await server.step(model_id, seq_id)
            ended += await ended_now(server)
        assert ended == [silent]
        assert [await server.heartbeat(session_id) for session_id in (silent, beating)] == [410, 200]


async def test_a_server_that_just_started_ends_nothing(tmp_path: Path, pass_time: Callable[[float], None]) -> None:
    async with served(tmp_path) as server:
        session_id = await server.new_session()
    pass_time(3000)
    async with served(tmp_path, session_idle_s=2000.0) as server:
        assert await ended_now(server) == []
        pass_time(2001)
        assert await ended_now(server) == [session_id]


async def test_a_clock_that_is_set_ends_no_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = time.time
    async with served(tmp_path, session_idle_s=60.0) as server:
        session_id = await server.new_session()
        assert await ended_now(server) == []
        await server.heartbeat(session_id)
        later = time.monotonic() + 61
        monkeypatch.setattr(time, "time", lambda: clock() + 3600)
        assert await ended_now(server) == []
        monkeypatch.setattr(time, "time", lambda: clock() - 3600)
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert await ended_now(server) == [session_id]


async def test_a_round_does_all_that_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, second_round = list[str](), asyncio.Event()

    def noting(name: str) -> Callable[..., object]:
        def note(*_: object) -> object:
            if name in done:
                second_round.set()
            done.append(name)
            return [] if name == "open_sessions" else 0

        return note

    due = ["open_sessions", "drop_results", "give_back_space", "forget_ended", "sweep", "check"]
    async with served(tmp_path, session_idle_s=0.04) as server:
        for name in due:
            monkeypatch.setattr(
                "tinsmith.server.lifetimes.sweep" if name == "sweep" else f"tinsmith.store.store.Store.{name}",
                noting(name),
            )
        rounds = asyncio.create_task(keep_up(server.hub.lifetimes, server.end_session))
        await second_round.wait()
        rounds.cancel()
    assert done[: len(due)] == due


@pytest.mark.parametrize("which_fails", ["unloading", "ending"])
async def test_a_session_that_cannot_be_ended_or_unloaded_keeps_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which_fails: str
) -> None:
    """Each that was ended is unloaded: no later round would find it."""
    finish_session, finished, told, ready = Store.finish_session, list[str](), set[str](), asyncio.Event()

    def finish_one(store: Store, session_id: str, status: str, detail: str | None) -> bool:
        if finished and which_fails == "ending":
            raise StoreUnavailableError("the database is locked")
        finished.append(session_id)
        return finish_session(store, session_id, status, detail)

    async def unload(session_id: str) -> None:
        told.add(session_id)
        if len(told) == (3 if which_fails == "unloading" else 1):
            ready.set()
        if which_fails == "unloading":
            raise EngineUnavailableError("the engine is not connected")

    async with served(tmp_path, session_idle_s=0.2) as server:
        for _ in range(3):
            await server.new_session()
        monkeypatch.setattr(Store, "finish_session", finish_one)
        rounds = asyncio.create_task(keep_up(server.hub.lifetimes, unload))
        await ready.wait()
        rounds.cancel()
        assert told == set(finished)


async def test_an_engine_is_told_of_the_sessions_that_ended_before_it_was_ready(server: Served) -> None:
    """Their commands may be in the log: it would load their models and never unload them."""
    hub = server.hub
    finished = await server.new_session()
    await server.end_session(finished)
    await hub.end_session("idle", save=True)
    hub.engine = EngineProcess(hub.config, hub.take, hub.engine_ready, hub.engine_absent, LIGHT_ENGINE)
    polls = [
        asyncio.create_task(hub.waiters.wait_for(f"ended {session_id}", no_outcome, 120.0))
        for session_id in (finished, "idle")
    ]
    async with running(hub.engine):
        told = [await poll for poll in polls]
    assert [outcome.error for outcome in told if isinstance(outcome, Outcome)] == ["False", "True"]


async def test_results_are_kept_for_their_time_or_until_their_session_ends(
    tmp_path: Path, pass_time: Callable[[float], None]
) -> None:
    async with served(tmp_path, result_ttl_s=100_000.0, session_idle_s=1e6) as server:

        async def status(request_id: str) -> int:
            await server.hub.lifetimes.drop_results()
            return (await server.post("retrieve_future", {"request_id": request_id})).status_code

        session_id = await server.new_session()
        model_id = await server.new_model(session_id)
        first = server.end(f"{model_id}/0")
        assert await status(first) == 200
        pass_time(100_001)
        second = server.end(await server.step(model_id, 1))
        assert [await status(request_id) for request_id in (first, second)] == [410, 200]
        gone = await server.post("retrieve_future", {"request_id": first})
        assert "is not kept any more" in refused(gone, 410)
        assert await server.step(model_id, 1) == second
        await server.end_session(session_id)
        assert await status(second) == 200
        pass_time(server.hub.lifetimes.round_s + 1)
        assert await status(second) == 410


async def test_a_snapshot_is_sampled_after_the_result_of_its_save_is_forgotten(tmp_path: Path) -> None:
    async with served(tmp_path, result_ttl_s=1.0) as server:
        model_id = await server.new_model()
        await server.answer(
            "save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
        )
        sampler = f"samplers/{model_id.partition(':')[0]}:sample:0"
        assert (await server.get(sampler)).status_code == 404
        server.end(f"{model_id}/1")
        await server.hub.store.write(Store.drop_results, time.time() + 1, 0.0)
        assert (await server.get(sampler)).status_code == 200
