"""What the server does with its engine process, on an engine without models: silence, unreadable messages, a device
that is lost.

Invariant: An engine that is frozen, unreadable or has lost its device is not ready, and is replaced.
Also: `tests/engine/test_loop.py`.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.preloaded import REAL_PYTHON
from tests.server.light_engine import REASON
from tests.server.serving import FACTS, LIGHT_ENGINE, Served, running, served
from tinsmith.config import Config, DistributedConfig, TrainingConfig
from tinsmith.errors import ConfigError, StoreUnavailableError
from tinsmith.protocol.child_process import EngineStart, is_stopped
from tinsmith.protocol.link import ServerLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Done, EndSession
from tinsmith.server.engine_process import EngineProcess
from tinsmith.server.engine_program import ENGINE

LONG_S = 120.0
"""How long anything here may take on a busy machine."""


class Watched:
    """An engine process, with the sessions that it ended and why it was absent."""

    def __init__(self, locked_for: int = 0, program: Sequence[str] = LIGHT_ENGINE) -> None:
        """The database refuses the news of an absent engine so many times."""
        self.ended: list[str] = []
        self.absences: list[str] = []
        self.locked_for = locked_for
        self.engine = EngineProcess(Config(), self.take, self.nothing, self.absent, program)

    def take(self, message: Message) -> None:
        if isinstance(message, Done):
            if message.request_id == "ended unreadable":
                raise ValueError("nobody can handle this")
            self.ended.append(message.request_id)

    async def nothing(self) -> None:
        pass

    async def absent(self, reason: str) -> int:
        self.absences.append(reason)
        if len(self.absences) <= self.locked_for:
            raise StoreUnavailableError("the database takes nothing at the moment")
        return len(self.absences)


async def until(seen: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while True:
            if seen():
                return
            await asyncio.sleep(0.02)


def pid_of(engine: EngineProcess) -> int:
    assert engine._process is not None
    return engine._process.pid


async def health(server: Served) -> tuple[int, int, int, str]:
    """Status of livez, readyz and healthz, and the reason of readyz."""
    live, ready, healthy = [await server.get(path) for path in ("livez", "readyz", "healthz")]
    return live.status_code, ready.status_code, healthy.status_code, ready.json().get("detail", "")


async def no_outcome() -> None:
    """What is known of a request that only a message tells of."""


async def test_a_frozen_engine_is_not_ready_until_it_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path, engine_silent_s=2.0, engine_hung_s=3600.0) as server:
        hub = server.hub
        hub.engine = EngineProcess(hub.config, hub.take, hub.engine_ready, hub.engine_absent, LIGHT_ENGINE)
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


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("it stays frozen", "(it had shown no sign of life for 6 s (engine_hung_s) and was killed)"),
        ("it loses its device", f"({REASON})"),
        ("nobody can listen to it", "the server could not listen to it any more: ZMQError"),
    ],
)
async def test_an_engine_that_is_of_no_use_is_replaced(
    monkeypatch: pytest.MonkeyPatch, trouble: str, reason: str
) -> None:
    receive = ServerLink.receive
    is_broken = False

    async def receive_or_fail(link: ServerLink) -> Message:
        nonlocal is_broken
        if is_broken:
            is_broken = False
            raise zmq.ZMQError(zmq.ENOTSOCK)
        return await receive(link)

    monkeypatch.setattr(ServerLink, "receive", receive_or_fail)
    monkeypatch.setattr("tinsmith.protocol.child_process.FIRST_DELAY_S", 0.0)
    watched = Watched()
    watched.engine._config.server.engine_hung_s = 6.0
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
        pid = pid_of(watched.engine)
        if trouble == "it stays frozen":
            os.kill(pid, signal.SIGSTOP)
        else:
            is_broken = trouble == "nobody can listen to it"
            await watched.engine.send(EndSession("a" if is_broken else "lost", save=False))
        await until(lambda: len(watched.absences) == 2 and watched.engine.is_ready)
        assert pid_of(watched.engine) != pid
    assert watched.absences[1].startswith("the engine process ended unexpectedly (")
    assert reason in watched.absences[1]


ENDED = "the engine process ended unexpectedly (signal 9)"
SOME_END = """
import io, json, os, runpy, signal, sys
told = sys.stdin.buffer.read()
if told and json.loads(told)["number"] <= {ends}:
    {how}
sys.stdin = io.TextIOWrapper(io.BytesIO(told))
runpy.run_path({engine!r}, run_name="__main__")
"""


def ends_first(ends: int, how: str) -> Watched:
    """An engine process of which the first so many end before they are ready."""
    return Watched(program=(REAL_PYTHON, "-c", SOME_END.format(ends=ends, how=how, engine=LIGHT_ENGINE[1])))


async def test_an_engine_that_is_killed_before_any_was_ready_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.protocol.child_process.FIRST_DELAY_S", 0.0)
    watched = ends_first(2, "os.kill(os.getpid(), signal.SIGKILL)")
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
    assert watched.absences == ["the server was restarted", ENDED, ENDED]


@pytest.mark.parametrize(("how", "starts"), [("os.kill(os.getpid(), signal.SIGKILL)", 3), ("sys.exit(1)", 1)])
async def test_a_server_ends_if_its_first_engines_do(monkeypatch: pytest.MonkeyPatch, how: str, starts: int) -> None:
    monkeypatch.setattr("tinsmith.protocol.child_process.FIRST_DELAY_S", 0.0)
    watched = ends_first(9, how)
    with pytest.raises(ConfigError, match="before it could take work; its output above says why"):
        await watched.engine.run()
    assert len(watched.absences) == starts


@pytest.mark.parametrize("fate", ["", "it has ended", "it is stopped"])
async def test_the_next_engine_stands_by(monkeypatch: pytest.MonkeyPatch, fate: str) -> None:
    """It takes the place of one that has ended, unless something has happened to itself."""
    monkeypatch.setattr("tinsmith.server.engine_process.STAND_BY_S", 0.0)
    watched = Watched()
    engine = watched.engine
    async with running(engine):
        await until(lambda: engine.is_ready and engine.spare is not None)
        assert engine.spare is not None
        first, spare = pid_of(engine), engine.spare
        if fate:
            os.kill(spare.pid, signal.SIGKILL if fate == "it has ended" else signal.SIGSTOP)
            await until(lambda: spare.exit_code is not None or is_stopped(spare.pid))
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(watched.absences) == 2 and engine.is_ready)
        assert (pid_of(engine) == spare.pid) == (not fate)
        await until(lambda: engine.spare not in (None, spare))
        assert engine.spare is not None
        last = engine.spare
    assert (spare.exit_code is not None, last.exit_code) == (True, -signal.SIGKILL)


async def test_an_engine_stands_by_only_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.server.engine_process.STAND_BY_S", 0.0)
    watched = Watched()
    watched.engine._config.server.stand_by = False
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
        await asyncio.sleep(0.1)
        assert watched.engine.spare is None


def test_an_engine_that_is_told_nothing_ends_with_its_server() -> None:
    assert told_engine(b"") == (0, "")


async def test_an_engine_that_cannot_start_says_why_and_nothing_else(tmp_path: Path) -> None:
    one = DistributedConfig(workers=1)
    config = Config(data_dir=str(tmp_path), distributed=one, training=TrainingConfig(sequence_parallel_from=9))
    with closing(ServerLink()) as link:
        exit_code, said = told_engine(EngineStart(link.address, 1, config).to_bytes())
    assert (exit_code, said.count("\n")) == (2, 1)
    assert said.startswith("tinsmith: sequence_parallel_from has no effect with one worker")


def told_engine(start: bytes) -> tuple[int, str]:
    """The exit code of an engine that imports its libraries as it is told this, and what it writes."""
    command = [REAL_PYTHON, *ENGINE[1:], str(os.getpid())]
    done = subprocess.run(command, input=start, capture_output=True, timeout=LONG_S, check=False)
    return done.returncode, done.stderr.decode()


async def test_a_message_that_cannot_be_handled_is_logged_and_the_next_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watched = Watched()
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
        for session_id in ("unreadable", "readable"):
            await watched.engine.send(EndSession(session_id, save=False))
        await until(lambda: watched.ended == ["ended readable"])
    assert len(watched.absences) == 1
    assert "ValueError: nobody can handle this" in caplog.text


async def test_the_server_outlives_an_engine_that_ends_while_the_database_is_locked() -> None:
    watched = Watched(locked_for=2)
    async with running(watched.engine):
        await until(lambda: watched.engine.is_ready)
        assert watched.absences == ["the server was restarted"] * 3


async def test_an_engine_that_lost_its_worker_takes_no_samples_until_it_has_another(server: Served) -> None:
    """The same engine goes on: what is only for it still reaches it, and what it was sampling is lost."""
    hub = server.hub
    hub.engine = EngineProcess(hub.config, hub.take, hub.engine_ready, hub.engine_absent, LIGHT_ENGINE)
    async with running(hub.engine):
        await until(lambda: hub.engine.is_ready)
        pid = pid_of(hub.engine)
        hub.base_models.replace([FACTS.to_dict()])
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1]}]}
        asked: dict[str, Any] = {
            "sampling_session_id": await server.new_sampler(),
            "prompt": prompt,
            "sampling_params": {"max_tokens": 4},
        }
        started = await server.answer("asample", asked | {"seq_id": 0})
        polled = asyncio.create_task(server.post("retrieve_future", {"request_id": started["request_id"]}))

        await hub.engine.send(EndSession("worker lost", save=False))
        await until(lambda: hub.engine.state == "recovering")
        assert await health(server) == (200, 503, 503, f"{REASON}; the engine starts another")
        assert (await polled).status_code == 410  # the SDK sends it again
        await server.refusal("asample", asked | {"seq_id": 1}, 503)
        for session in ("in between", "worker back"):
            await hub.engine.notify(EndSession(session, save=False))
        assert await hub.waiters.wait_for("ended in between", no_outcome, LONG_S) is not None
        await until(lambda: hub.engine.is_ready)
        assert pid_of(hub.engine) == pid
        assert await health(server) == (200, 200, 200, "")
