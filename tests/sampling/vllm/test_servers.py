"""Servers that are started, die and hang, and where a prompt goes: real processes on real sockets, which only say that they live.

Invariant: A server that hangs is replaced, a long answer does not count as hanging, and a prompt goes to the server that knows its
beginning.
Also: `tests/with_vllm/test_a_sampler.py`.

Invariant: A server whose engine or worker died is replaced, though its process stays and never answers what was under way.
Also: `tests/sampling/vllm/test_instance.py`, `tests/with_vllm/test_servers.py`.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from tests.extent import slow
from tests.preloaded import REAL_PYTHON
from tests.sampling.vllm import stub_server
from tests.sampling.vllm.answering import answering, in_a_loop
from tinsmith.errors import TinsmithError
from tinsmith.sampling.vllm import servers as room
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.protocol import ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.servers import Launch, Server, Servers, log_excerpt

AWAY = 16
HUNG_S = 0.5
START_S = 20.0
"""How long a stub may take to start, on a busy machine too."""
STUB = [REAL_PYTHON, str(stub_server.__file__)]

TryOut = Callable[[Instance], Awaitable[None]]


def launch_of(directory: Path, command: list[str], name: str = "stub") -> Launch:
    return Launch(command, dict(os.environ), directory, name, directory / f"{name}.log", "file")


@asynccontextmanager
async def supervised(*sources: Launch | str, hung_s: float = 600, try_out: TryOut | None = None) -> AsyncIterator[Servers]:
    """Servers that are kept running until the body ends."""
    changed = asyncio.Condition()
    servers = Servers([Server(source, 8, hung_s, changed, try_out) for source in sources], changed)
    try:
        yield servers
    finally:
        for task in servers.tasks:
            task.cancel()
        await asyncio.gather(*servers.tasks, return_exceptions=True)


async def ready(server: Server, after: Instance | None = None) -> Instance:
    """The server's instance, as soon as it is ready and has begun another than `after`."""
    async with asyncio.timeout(600), server.changed:
        await server.changed.wait_for(lambda: server.state == "ready" and server.instance is not after)
    assert server.instance is not None
    return server.instance


def pid_of(server: Server) -> int:
    assert server.process is not None
    return server.process.pid


@asynccontextmanager
async def one_stub(directory: Path, hung_s: float = 600) -> AsyncIterator[tuple[Servers, Server, Instance]]:
    """A server that is ready, with those that it is all of."""
    async with supervised(launch_of(directory, STUB), hung_s=hung_s) as servers:
        yield servers, servers.all[0], await ready(servers.all[0])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often whether a server lives, and let it go on refusing for half a second only."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)


@in_a_loop
async def test_prompts_go_where_they_began_unless_much_less_is_done_elsewhere(tmp_path: Path) -> None:
    async def live(_: web.Request) -> web.Response:
        return web.Response()

    for name in "ab":
        (tmp_path / name).mkdir()
    async with (
        answering(tmp_path / "a", live) as one,
        answering(tmp_path / "b", live) as other,
        supervised(one.url, other.url) as servers,
    ):
        first, second = servers.all
        await asyncio.gather(ready(first), ready(second))

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


@in_a_loop
async def test_one_of_two_dies_and_comes_back_and_every_start_draws_other_samples(tmp_path: Path) -> None:
    """VLLM's own seed is always the same."""

    def seed(server: Server) -> int:
        command = Path(f"/proc/{pid_of(server)}/cmdline").read_text().split("\0")
        return int(command[command.index("--seed") + 1])

    async with supervised(*(launch_of(tmp_path, STUB, name) for name in "ab")) as servers:
        first, second = servers.all
        instance, _ = await asyncio.gather(ready(first), ready(second))
        seeds = {seed(first), seed(second)}
        assert (await servers.pick([b"a"], AWAY))[0] is first
        answer = asyncio.create_task(instance.connection.get("/long"))
        await asyncio.sleep(0.2)
        os.kill(pid_of(first), signal.SIGKILL)
        with pytest.raises(ServerLostError):
            await answer
        first.suspect(instance, "it went away")
        assert (await servers.pick([b"a"], AWAY))[0] is second
        assert await (await ready(first, after=instance)).answers()
        assert len({*seeds, seed(first)}) == 3


@in_a_loop
async def test_a_given_server_that_goes_while_idle_and_comes_back_begins_a_new_life(tmp_path: Path) -> None:
    """It has lost what it was given."""
    command = [*STUB, "--uds", str(tmp_path / "given")]
    process = await asyncio.create_subprocess_exec(*command)
    async with supervised(f"unix:{tmp_path / 'given'}") as servers:
        (given,) = servers.all
        try:
            instance = await ready(given)
            process.kill()
            await process.wait()
            async with asyncio.timeout(600), given.changed:
                await given.changed.wait_for(lambda: given.state != "ready")
            process = await asyncio.create_subprocess_exec(*command)
            assert (await ready(given, after=instance)).number != instance.number
        finally:
            process.kill()


@in_a_loop
async def test_a_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    """It takes requests for ever and answers none. One with nothing to do is left alone."""
    async with supervised(*(launch_of(tmp_path, STUB, name) for name in ("idle", "busy")), hung_s=HUNG_S) as servers:
        idle, busy = servers.all
        resting, instance = await asyncio.gather(ready(idle), ready(busy))
        stopped, busy.load = pid_of(busy), 1
        for server in servers.all:
            os.kill(pid_of(server), signal.SIGSTOP)
        asked = asyncio.create_task(instance.connection.get("/health"))
        await ready(busy, after=instance)
        with pytest.raises(ServerLostError):
            await asked
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
        assert idle.instance is resting


@in_a_loop
async def test_a_long_answer_is_no_silence(tmp_path: Path) -> None:
    async with one_stub(tmp_path, hung_s=2) as (_, server, instance):
        server.load = 1
        assert await instance.connection.get("/long") == {"took": "long"}  # twice as long as a hung one may be silent
        assert server.instance is instance


@pytest.mark.parametrize("load", [0, 1])
@in_a_loop
async def test_a_server_whose_engine_ended_is_replaced_though_its_process_stays(
    load: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """VLLM's server ends only when all requests have ended, and it never answers some that were under way when its engine died."""
    async with one_stub(tmp_path) as (_, server, instance):
        server.load = load
        asked = asyncio.create_task(instance.connection.get("/never"))
        await ready(server, after=instance)
        with pytest.raises(ServerLostError):
            await asked
    assert "a vLLM server was killed, because its engine has ended, or it takes no requests any more" in caplog.text


@pytest.mark.parametrize(
    ("paths", "error", "words"),
    [
        (["/die"], None, "a vLLM server ended (exit code -9)"),
        (["/never"], None, "was killed, because its engine has ended"),
        (["/lose_worker"], ServerFailedError, "was killed, because a worker of it has ended"),
        # It still answers, so it stays; an error that nobody expects is most likely the trainer's.
        ([], RuntimeError, ""),
        # It waits for 20 s; a server that hangs when it is not tried out is above.
        *slow((["/busy?for_s=3600", "/is_paused"], None, "was killed, because it hangs: it answered nothing for 20 s")),
    ],
)
@in_a_loop
async def test_a_server_that_dies_or_whose_engine_ends_or_hangs_while_it_is_tried_out_is_replaced(
    paths: list[str],
    error: type[Exception] | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(room, "_STARTS_WITHIN_S", START_S)
    tried: list[Instance] = []

    async def try_out(instance: Instance) -> None:
        tried.append(instance)
        for path in paths if len(tried) == 1 else []:
            await instance.connection.get(path)
        if error is not None and len(tried) == 1:
            raise error("no memory for it")

    async with supervised(launch_of(tmp_path, STUB), hung_s=HUNG_S, try_out=try_out) as servers:
        assert await ready(servers.all[0]) is tried[-1]
    assert len(tried) == (2 if words else 1)
    assert words in caplog.text
    assert ("no memory for it" in caplog.text) == (error is not None)


@in_a_loop
async def test_a_server_that_lost_a_worker_is_replaced_before_it_is_sampled_from_again(tmp_path: Path) -> None:
    """For some seconds vLLM's engine answers, and fails in all that needs its workers."""
    async with one_stub(tmp_path) as (servers, server, instance):
        await instance.connection.get("/lose_worker")
        server.suspect(instance, "it failed")
        assert (await servers.pick([], AWAY))[1] is not instance


@in_a_loop
async def test_a_busy_server_that_lost_one_request_stays(tmp_path: Path) -> None:
    """Its engine is silent for longer than a server may refuse, and then answers."""
    async with one_stub(tmp_path) as (servers, server, instance):
        server.load = 1
        await instance.connection.get("/busy?for_s=2")
        server.suspect(instance, "one connection broke")
        assert (await servers.pick([], AWAY))[1] is instance


def test_the_reason_is_shown_of_a_server_that_ends() -> None:
    """It stands in vLLM's log before much else: more than the end of the log must be shown."""
    log = b"""(APIServer pid=7) ERROR 11-22 08:20:58 [registry.py:1122]     raise RuntimeError("nothing here")
(APIServer pid=7) ERROR 11-22 08:20:58 [registry.py:1122] RuntimeError: operator torchvision::nms does not exist
"""
    words = log_excerpt(log + b"and so on\n" * 1000)
    assert words.startswith("RuntimeError: operator torchvision::nms does not exist\n...\nand so on\n")
    assert words.endswith("and so on")
    assert log_excerpt(log) == log.decode().strip()


@in_a_loop
async def test_a_server_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    """Nobody waits for its whole time: the reason is there as soon as it has ended."""
    async with supervised(launch_of(tmp_path, [REAL_PYTHON, "-c", "raise RuntimeError('no such model')"])) as servers:
        with pytest.raises(TinsmithError, match=r"a vLLM server ended \(exit code 1\); .*/stub.log says: (?s:.*)RuntimeError: no such"):
            await servers.pick([], AWAY)
