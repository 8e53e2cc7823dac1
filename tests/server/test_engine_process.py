"""What the server does with its engine process, on an engine without models: silence, unreadable messages, a device that is lost.

Invariant: An engine that is frozen, unreadable or has lost its device is not ready, and is replaced.
Also: `tests/engine/test_loop.py`.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from tests.server.light_engine import REASON
from tests.server.serving import FACTS, LIGHT_ENGINE, Served, running, served
from tinsmith.config import Config, ServerConfig
from tinsmith.protocol.link import ServerLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Done, EndSession
from tinsmith.server.engine_process import EngineProcess

LONG_S = 120.0
"""How long anything here may take on a busy machine."""


class Watched:
    """An engine process, with what it said and why it was absent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.absences: list[str] = []
        self.engine = EngineProcess(Config(), self.take, self.nothing, self.absent, LIGHT_ENGINE)

    def take(self, message: Message) -> None:
        if isinstance(message, Done) and message.request_id == "ended unreadable":
            raise ValueError("nobody can handle this")
        self.messages.append(message)

    async def nothing(self) -> None:
        pass

    async def absent(self, reason: str) -> None:
        self.absences.append(reason)

    def has_ended(self, session_id: str) -> bool:
        return any(isinstance(message, Done) and message.request_id == f"ended {session_id}" for message in self.messages)


async def until(seen: Callable[[], object]) -> None:
    """Wait until that is true."""
    async with asyncio.timeout(LONG_S):
        while True:
            if seen():
                return
            await asyncio.sleep(0.02)


def pid_of(engine: EngineProcess) -> int:
    """The running engine's process id."""
    assert engine._process is not None
    return engine._process.pid


async def health(server: Served) -> tuple[int, int, int, str]:
    """Status of livez, readyz and healthz, and the reason of readyz."""
    live, ready, healthy = [await server.client.get(f"/api/v1/{path}") for path in ("livez", "readyz", "healthz")]
    return live.status_code, ready.status_code, healthy.status_code, ready.json().get("detail", "")


async def test_a_frozen_engine_is_not_ready_until_it_goes_on(tmp_path: Path) -> None:
    config = Config(server=ServerConfig(engine_silent_s=2.0, engine_hung_s=3600.0))
    async with served(tmp_path, config) as server:
        hub = server.hub
        hub.engine = EngineProcess(config, hub.take, hub.engine_ready, hub.engine_absent, LIGHT_ENGINE)
        assert await health(server) == (200, 503, 503, "the engine is starting")
        async with running(hub.engine):
            await until(lambda: hub.engine.is_ready)
            assert await health(server) == (200, 200, 200, "")
            pid = pid_of(hub.engine)
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: hub.engine.state == "silent")
            *codes, reason = await health(server)
            assert (codes, reason.startswith("the engine has shown no sign of life for ")) == ([200, 503, 503], True)
            told = asyncio.create_task(hub.waiters.wait_for("ended in silence", no_outcome, LONG_S))
            await hub.end_session("in silence", save=False)
            os.kill(pid, signal.SIGCONT)
            await until(lambda: hub.engine.is_ready)
            assert pid_of(hub.engine) == pid
            assert await told is not None


async def no_outcome() -> None:
    """What is known of a request that only a message tells of."""


async def replaced(watched: Watched, monkeypatch: pytest.MonkeyPatch, end: Callable[[int], Awaitable[None]]) -> str:
    """Why the engine was absent, after `end` has ended the process of that id: another runs then."""
    monkeypatch.setattr("tinsmith.protocol.child_process.FIRST_DELAY_S", 0.0)
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
        pid = pid_of(watched.engine)
        await end(pid)
        await until(lambda: len(watched.absences) == 2)
        await until(lambda: watched.engine.is_ready)
        assert pid_of(watched.engine) != pid
    return watched.absences[1]


async def test_an_engine_that_stays_frozen_is_killed_and_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    watched.engine._config.server.engine_hung_s = 6.0

    async def freeze(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)

    reason = "the engine process ended unexpectedly (it had shown no sign of life for 6 s (engine_hung_s) and was killed)"
    assert await replaced(watched, monkeypatch, freeze) == reason


async def test_an_engine_that_loses_its_device_says_so_and_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()

    async def lose(_: int) -> None:
        await watched.engine.send(EndSession("lost", save=False))

    assert await replaced(watched, monkeypatch, lose) == f"the engine process ended unexpectedly ({REASON})"


async def test_an_engine_that_nobody_can_listen_to_is_replaced(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    receive = ServerLink.receive
    broken = False

    async def receive_or_fail(link: ServerLink) -> Message:
        nonlocal broken
        if broken:
            broken = False
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return await receive(link)

    async def break_link(_: int) -> None:
        nonlocal broken
        broken = True
        await watched.engine.send(EndSession("a", save=False))

    monkeypatch.setattr(ServerLink, "receive", receive_or_fail)
    watched = Watched()
    assert "the server could not listen to it any more: ZMQError" in await replaced(watched, monkeypatch, break_link)
    assert "the server cannot listen to it any more" in caplog.text


async def test_a_message_that_cannot_be_handled_is_logged_and_the_next_is_read(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
        for session_id in ("unreadable", "readable"):
            await watched.engine.send(EndSession(session_id, save=False))
        await until(lambda: watched.has_ended("readable"))
        assert not watched.has_ended("unreadable")
    assert len(watched.absences) == 1
    assert "a message of the engine could not be handled" in caplog.text
    assert "ValueError: nobody can handle this" in caplog.text


async def test_an_engine_that_lost_its_worker_takes_no_samples_until_it_has_another(server: Served) -> None:
    """The same engine goes on: what is only for it still reaches it, and what it was sampling is lost."""
    hub = server.hub
    hub.engine = EngineProcess(hub.config, hub.take, hub.engine_ready, hub.engine_absent, LIGHT_ENGINE)
    async with running(hub.engine):
        await until(lambda: hub.engine.is_ready)
        pid = pid_of(hub.engine)
        hub.base_models.replace([FACTS.to_dict()])
        session_id = await server.new_session()
        body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = (await server.post("create_sampling_session", body)).json()["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        asked = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 4, "stop": []}}
        started = await server.post("asample", asked)
        assert started.status_code == 200, started.text
        polled = asyncio.create_task(server.post("retrieve_future", {"request_id": started.json()["request_id"]}))

        await hub.engine.send(EndSession("worker lost", save=False))
        await until(lambda: hub.engine.state == "recovering")
        assert await health(server) == (200, 503, 503, f"{REASON}; the engine starts another")
        assert (await polled).status_code == 410  # the SDK sends it again
        assert (await server.post("asample", asked | {"seq_id": 1})).status_code == 503
        for session in ("in between", "worker back"):
            await hub.engine.notify(EndSession(session, save=False))
        assert await hub.waiters.wait_for("ended in between", no_outcome, LONG_S) is not None
        await until(lambda: hub.engine.is_ready)
        assert pid_of(hub.engine) == pid
        assert await health(server) == (200, 200, 200, "")
