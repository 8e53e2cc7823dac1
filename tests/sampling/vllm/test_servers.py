"""Servers that are started, die and hang, and where a prompt goes: real processes on real sockets, which only say that they live."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.extent import slow
from tests.preloaded import REAL_PYTHON
from tests.sampling.vllm import stub_server
from tinsmith.errors import TinsmithError
from tinsmith.sampling.vllm import servers as room
from tinsmith.sampling.vllm.connection import ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.servers import Launch, Server, Servers, log_excerpt

AWAY = 16
HUNG_S = 0.5
START_S = 20.0
"""How long a stub may take to start, on a busy machine too."""


def with_servers(
    directory: Path,
    count: int,
    story: Callable[[Servers], Awaitable[None]],
    hung_s: float = HUNG_S,
    try_out: Callable[[Instance], Awaitable[None]] | None = None,
) -> None:
    """Tell the story to that many servers that are ready."""

    async def tell() -> None:
        changed = asyncio.Condition()
        command = [REAL_PYTHON, str(stub_server.__file__)]
        names = [f"stub-{index}" for index in range(count)]
        sources = [Launch(command, dict(os.environ), directory, name, directory / f"{name}.log", "file") for name in names]
        all_servers = Servers([Server(source, 8, hung_s, changed, try_out) for source in sources], changed)
        try:
            for server in all_servers.all:
                await ready(server)
            await story(all_servers)
        finally:
            for task in all_servers.tasks:
                task.cancel()
            await asyncio.gather(*all_servers.tasks, return_exceptions=True)

    asyncio.run(tell())


async def ready(server: Server, after: Instance | None = None) -> Instance:
    """The server's instance, as soon as it is ready and has begun another than `after`."""
    async with asyncio.timeout(600), server.changed:
        await server.changed.wait_for(lambda: server.state == "ready" and server.instance is not after)
    assert server.instance is not None
    return server.instance


def pid_of(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


def test_prompts_go_where_they_began_unless_much_less_is_done_elsewhere(tmp_path: Path) -> None:
    async def story(servers: Servers) -> None:
        first, second = servers.all

        async def chosen(*keys: bytes) -> Server:
            return (await servers.pick([*keys], AWAY))[0]

        assert await chosen(b"a") is first
        first.load = 1
        assert await chosen(b"b") is second
        first.load, second.load = AWAY, 0
        assert await chosen(b"a", b"a2", b"a3") is first  # a conversation goes on
        assert await chosen(b"a", b"a2", b"a3", b"a4") is first
        assert await chosen() is second
        first.load = AWAY + 1
        assert await chosen(b"a", b"a2") is second
        first.load = 0
        assert await chosen(b"a", b"a2") is second  # where its newest turn was computed

    with_servers(tmp_path, 2, story)


def test_one_of_two_dies_and_comes_back(tmp_path: Path) -> None:
    async def story(servers: Servers) -> None:
        first, second = servers.all
        instance = await ready(first)
        assert (await servers.pick([b"a"], AWAY))[0] is first
        answer = asyncio.create_task(instance.connection.get("/long"))
        await asyncio.sleep(0.2)
        os.kill(pid_of(first), signal.SIGKILL)
        with pytest.raises(ServerLostError):
            await answer
        first.suspect(instance, "it went away")
        assert (await servers.pick([b"a"], AWAY))[0] is second
        assert await (await ready(first, after=instance)).answers()

    with_servers(tmp_path, 2, story)


def test_every_start_draws_other_samples(tmp_path: Path) -> None:
    """VLLM's own seed is always the same."""

    def seed(server: Server) -> int:
        command = Path(f"/proc/{pid_of(server)}/cmdline").read_text().split("\0")
        return int(command[command.index("--seed") + 1])

    async def story(servers: Servers) -> None:
        first, second = servers.all
        seeds = {seed(first), seed(second)}
        instance = await ready(first)
        os.kill(pid_of(first), signal.SIGKILL)
        await ready(first, after=instance)
        assert len({*seeds, seed(first)}) == 3

    with_servers(tmp_path, 2, story)


def test_a_given_server_that_goes_while_idle_and_comes_back_begins_a_new_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has lost what it was given."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)
    socket = tmp_path / "given"
    command = [REAL_PYTHON, str(stub_server.__file__), "--uds", str(socket)]

    async def tell() -> None:
        changed = asyncio.Condition()
        process = await asyncio.create_subprocess_exec(*command)
        given = Server(f"unix:{socket}", 8, HUNG_S, changed)
        servers = Servers([given], changed)
        try:
            instance = await ready(given)
            process.kill()
            await process.wait()
            async with asyncio.timeout(600), changed:
                await changed.wait_for(lambda: given.state != "ready")
            process = await asyncio.create_subprocess_exec(*command)
            assert (await ready(given, after=instance)).number != instance.number
        finally:
            process.kill()
            for task in servers.tasks:
                task.cancel()
            await asyncio.gather(*servers.tasks, return_exceptions=True)

    asyncio.run(tell())


def test_a_server_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes requests for ever and answers none. One with nothing to do is left alone."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)

    async def story(servers: Servers) -> None:
        idle, busy = servers.all
        instances = [await ready(server) for server in servers.all]
        busy.load = 1
        for server in servers.all:
            os.kill(pid_of(server), signal.SIGSTOP)
        asked = asyncio.create_task(instances[1].connection.get("/health"))
        stopped = pid_of(busy)
        await ready(busy, after=instances[1])
        with pytest.raises(ServerLostError):
            await asked
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
        assert idle.instance is instances[0]

    with_servers(tmp_path, 2, story)


def test_a_long_answer_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)

    async def story(servers: Servers) -> None:
        (server,) = servers.all
        instance = await ready(server)
        server.load = 1
        assert await instance.connection.get("/long") == {"took": "long"}  # four times as long as a hung one may be silent
        assert server.instance is instance

    with_servers(tmp_path, 1, story)


@pytest.mark.parametrize("load", [0, 1])
def test_a_server_whose_engine_ended_is_replaced_though_its_process_stays(
    load: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM's server ends only when all requests have ended, and it never answers some that were under way when its engine died."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)

    async def story(servers: Servers) -> None:
        (server,) = servers.all
        instance = await ready(server)
        server.load = load
        asked = asyncio.create_task(instance.connection.get("/never"))
        await ready(server, after=instance)
        with pytest.raises(ServerLostError):
            await asked

    with_servers(tmp_path, 1, story, hung_s=600)
    assert "a vLLM server was killed, because its engine has ended, or it takes no requests any more" in caplog.text


@pytest.mark.parametrize("path", ["/never", *slow("/busy?for_s=3600")])
def test_a_server_whose_engine_ends_or_hangs_while_it_is_tried_out_is_replaced(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)
    monkeypatch.setattr(room, "_STARTS_WITHIN_S", START_S)
    tried: list[Instance] = []

    async def try_out(instance: Instance) -> None:
        tried.append(instance)
        if len(tried) == 1:
            await instance.connection.get(path)
            await instance.connection.get("/is_paused")

    async def story(servers: Servers) -> None:
        assert await ready(servers.all[0]) is tried[1]

    with_servers(tmp_path, 1, story, try_out=try_out)


def test_the_log_tells_how_a_server_ended_that_died_while_it_was_tried_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tried: list[Instance] = []

    async def try_out(instance: Instance) -> None:
        tried.append(instance)
        if len(tried) == 1:
            await instance.connection.get("/die")

    async def story(servers: Servers) -> None:
        assert await ready(servers.all[0]) is tried[1]

    with_servers(tmp_path, 1, story, hung_s=600, try_out=try_out)
    assert "a vLLM server ended (exit code -9)" in caplog.text


@pytest.mark.parametrize("error", [ServerFailedError, RuntimeError, ServerLostError])
@pytest.mark.parametrize("loses_worker", [False, True])
def test_a_server_stays_after_a_try_out_that_fails_if_it_still_answers(
    loses_worker: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that nobody expects is most likely the trainer's: a new server would not help."""
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)
    tried: list[Instance] = []

    async def try_out(instance: Instance) -> None:
        tried.append(instance)
        if len(tried) == 1:
            if loses_worker:
                await instance.connection.get("/lose_worker")
            raise error("no memory for it")

    async def story(servers: Servers) -> None:
        assert await ready(servers.all[0]) is tried[-1]
        assert len(tried) == 1 + loses_worker

    with_servers(tmp_path, 1, story, hung_s=600, try_out=try_out)
    assert "no memory for it" in caplog.text
    assert ("was killed, because a worker of it has ended" in caplog.text) == loses_worker


def test_a_server_that_lost_a_worker_is_replaced_before_it_is_sampled_from_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some seconds vLLM's engine answers, and fails in all that needs its workers."""
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)

    async def story(servers: Servers) -> None:
        (server,) = servers.all
        instance = await ready(server)
        await instance.connection.get("/lose_worker")
        assert not await instance.answers()
        server.suspect(instance, "it failed")
        assert (await servers.pick([], AWAY))[1] is not instance

    with_servers(tmp_path, 1, story, hung_s=600)


def test_a_busy_server_that_lost_one_request_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine is silent for longer than a server may refuse, and then answers."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)

    async def story(servers: Servers) -> None:
        (server,) = servers.all
        instance = await ready(server)
        server.load = 1
        began = time.monotonic()
        await instance.connection.get("/busy?for_s=2")
        server.suspect(instance, "one connection broke")
        suspected = time.monotonic()
        assert (await servers.pick([], AWAY))[1] is instance
        assert time.monotonic() - suspected > 0.5 or suspected - began > 1.5, "it was busy longer than a server may refuse"

    with_servers(tmp_path, 1, story, hung_s=600)


def test_the_reason_is_shown_of_a_server_that_ends(tmp_path: Path) -> None:
    """It stands in vLLM's log before much else: more than the end of the log must be shown."""
    log = b"""(APIServer pid=7) ERROR 11-22 08:20:58 [registry.py:1122]     raise RuntimeError("nothing here")
(APIServer pid=7) ERROR 11-22 08:20:58 [registry.py:1122] RuntimeError: operator torchvision::nms does not exist
"""
    rest = b"and so on\n" * 1000
    words = log_excerpt(log + rest)
    assert words.startswith("RuntimeError: operator torchvision::nms does not exist\n...\nand so on\n")
    assert words.endswith("and so on")
    assert log_excerpt(log) == log.decode().strip()


def test_a_server_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    """Nobody waits for its whole time: the reason is there as soon as it has ended."""

    async def tell() -> None:
        changed = asyncio.Condition()
        command = [REAL_PYTHON, "-c", "raise RuntimeError('no such model')"]
        server = Server(Launch(command, dict(os.environ), tmp_path, "ends", tmp_path / "log", "file"), 8, HUNG_S, changed)
        servers = Servers([server], changed)
        with pytest.raises(TinsmithError, match=r"a vLLM server ended \(exit code 1\); .*/log says: (?s:.*)RuntimeError: no such model"):
            await servers.pick([], AWAY)
        servers.tasks[0].cancel()
        await asyncio.gather(*servers.tasks, return_exceptions=True)

    asyncio.run(tell())
