"""Servers that are started, die and hang, and where a prompt goes: real processes on real sockets, which only say that
they live.

Invariant: A server that hangs is replaced, a long answer does not count as hanging, and a prompt goes to the server
that knows its beginning. Also: `tests/with_vllm/test_a_sampler.py`.

Invariant: A server whose engine or worker died is replaced, though its process stays and never answers what was under
way. Also: `tests/with_vllm/test_servers.py`.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.extent import slow
from tests.preloaded import REAL_PYTHON
from tests.sampling.vllm import stub_server
from tests.sampling.vllm.answering import in_a_loop
from tinsmith.errors import TinsmithError
from tinsmith.sampling.vllm import servers as room
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Instance, Slots, WeightsLock
from tinsmith.sampling.vllm.protocol import ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.servers import Launch, Server, Servers

AWAY = 16
HUNG_S = 0.5
START_S = 20.0
"""How long a stub may take to start, on a busy machine too."""
STUB = [REAL_PYTHON, str(stub_server.__file__)]

TryOut = Callable[[Instance], Coroutine[Any, Any, None]]


def launch_of(directory: Path, command: list[str], name: str = "stub") -> Launch:
    return Launch(command, dict(os.environ), directory, name, directory / f"{name}.log", "file")


@asynccontextmanager
async def supervised(
    *sources: Launch | str, hung_s: float = 600, try_out: TryOut | None = None
) -> AsyncIterator[Servers]:
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
    """Look often whether a server lives."""
    monkeypatch.setattr(room, "_LOOK_EVERY_S", 0.1)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server go on refusing for half a second only."""
    monkeypatch.setattr(room, "_ANSWERS_WITHIN_S", 0.5)


@in_a_loop
async def test_prompts_go_where_they_began_unless_much_less_is_done_elsewhere(tmp_path: Path) -> None:
    async with supervised(*(launch_of(tmp_path, STUB, name) for name in "ab")) as servers:
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


@pytest.mark.parametrize(
    ("path", "load", "why"),
    [("/never", 0, "its engine has"), ("/never", 1, "its engine has"), ("/stop", 1, "it hangs")],
)
@pytest.mark.usefixtures("impatient")
@in_a_loop
async def test_a_server_that_hangs_or_whose_engine_ended_is_replaced(
    path: str, load: int, why: str, tmp_path: Path, caplog: Any
) -> None:
    """VLLM's server ends only when all requests have ended, and it never answers some that were under way when its
    engine died."""
    async with one_stub(tmp_path, hung_s=HUNG_S if path == "/stop" else 600) as (_, server, instance):
        server.load, former = load, pid_of(server)
        asked = asyncio.create_task(instance.connection.get(path))
        await ready(server, after=instance)
        with pytest.raises(ServerLostError):
            await asked
        with pytest.raises(ProcessLookupError):
            os.kill(former, 0)
    assert f"a vLLM server was killed, because {why}" in caplog.text


@in_a_loop
async def test_a_long_answer_is_no_silence(tmp_path: Path) -> None:
    async with one_stub(tmp_path, hung_s=2) as (_, server, instance):
        server.load = 1
        assert await instance.connection.get("/long") == {"took": "long"}  # twice as long as a hung one may be silent
        assert server.instance is instance


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
@pytest.mark.usefixtures("impatient")
@in_a_loop
async def test_a_server_that_fails_while_it_is_tried_out_is_replaced(
    paths: list[str],
    error: Any,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It dies, loses its engine or a worker, or hangs."""
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


@pytest.mark.parametrize(("path", "stays"), [("/lose_worker", False), ("/busy?for_s=2", True)])
@pytest.mark.usefixtures("impatient")
@in_a_loop
async def test_a_server_that_failed_is_sampled_again_if_it_still_answers(
    path: str, stays: bool, tmp_path: Path
) -> None:
    """For some seconds vLLM's engine answers without a worker.

    A busy one is silent for longer than it may refuse, and then answers.
    """
    async with one_stub(tmp_path) as (servers, server, instance):
        server.load = 1
        await instance.connection.get(path)
        server.suspect(instance, "it failed")
        assert ((await servers.pick([], AWAY))[1] is instance) == stays


@in_a_loop
async def test_a_server_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    """Nobody waits for its whole time.

    The reason stands in vLLM's log before much else: more than the end of the log must be shown.
    """
    program = (
        "print('(APIServer pid=7) ERROR [registry.py:1] RuntimeError: no such model\\n' + 'and so on\\n' * 1000); "
        "raise SystemExit(1)"
    )
    async with supervised(launch_of(tmp_path, [REAL_PYTHON, "-c", program])) as servers:
        words = (
            r"a vLLM server ended \(exit code 1\); .*/stub.log says: RuntimeError: no such model\n...\n(?s:.*)and so on"
        )
        with pytest.raises(TinsmithError, match=words):
            await servers.pick([], AWAY)


# How many sequences a server runs at a time, and whose weights it has


@in_a_loop
async def test_sequences_that_wait_get_a_slot_each_in_turn_and_who_gives_up_takes_none_along() -> None:
    slots, begun, end = Slots(4), list[tuple[str, int]](), asyncio.Event()

    async def hold(name: str) -> None:
        async with slots.reserve(3) as count:
            begun.append((name, count))
            await end.wait()

    first = asyncio.create_task(hold("first"))
    await asyncio.sleep(0)
    async with slots.reserve(3) as count:
        assert count == 1
        early, late, last = (asyncio.create_task(hold(name)) for name in ("early", "late", "last"))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.wait([early])
    late.cancel()  # it has just got one
    await asyncio.wait([late])
    await asyncio.sleep(0)
    assert begun == [("first", 3), ("last", 1)]
    end.set()
    await asyncio.gather(first, last)
    async with slots.reserve(5) as count:
        assert count == 4
        waited = asyncio.create_task(hold("waited"))
        await asyncio.sleep(0)
    await waited
    assert begun[-1] == ("waited", 1)  # though all were given back at once


class Story:
    """What happened at a lock, in order."""

    def __init__(self) -> None:
        self.lock = WeightsLock()
        self.events: list[str] = []
        self.switching_began, self.may_switch = asyncio.Event(), asyncio.Event()
        self.may_switch.set()

    async def run(self, key: str, name: str) -> None:
        async with self.lock.holding(key, self.switching(key)):
            self.events.append(f"{name} begins")
            assert self.lock.weights == key
            await asyncio.sleep(0)
            self.events.append(f"{name} ends")

    def switching(self, key: str) -> Callable[[], Coroutine[Any, Any, None]]:
        async def switch() -> None:
            assert self.lock.running == 1
            self.events.append(f"to {key}")
            self.switching_began.set()
            await self.may_switch.wait()

        return switch


@in_a_loop
async def test_requests_for_the_same_weights_run_together_and_others_wait() -> None:
    story = Story()
    await asyncio.gather(*(story.run(key, name) for key, name in ((BASE, "a"), ("7", "b"), (BASE, "c"), ("7", "d"))))
    assert (story.lock.running, len(story.lock.queue)) == (0, 0)
    of_seven = ["to 7", "b begins", "d begins", "b ends", "d ends"]
    assert story.events == ["a begins", "a ends", *of_seven, "to ", "c begins", "c ends"]


@in_a_loop
async def test_a_switch_that_fails_fails_one_and_the_next_switches_from_an_unknown_state() -> None:
    story = Story()

    async def broken() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        async with story.lock.holding("7", broken):
            raise AssertionError
    assert story.lock.weights == UNKNOWN
    await story.run(BASE, "a")
    assert story.events == ["to ", "a begins", "a ends"]


@in_a_loop
async def test_who_gives_up_waiting_for_weights_holds_nobody_up() -> None:
    story = Story()
    async with story.lock.holding(BASE, story.switching(BASE)):
        gives_up, follows = (asyncio.create_task(story.run(key, name)) for key, name in (("7", "b"), (BASE, "c")))
        await asyncio.sleep(0)
        gives_up.cancel()
        await follows
    await asyncio.wait([gives_up])
    assert (story.lock.weights, story.events) == (BASE, ["c begins", "c ends"])


@pytest.mark.parametrize("times", [1, 3])
@in_a_loop
async def test_a_switch_is_finished_when_who_wanted_it_gives_up(times: int) -> None:
    story = Story()
    story.may_switch.clear()
    first = asyncio.create_task(story.run("7", "a"))
    await story.switching_began.wait()
    for _ in range(times):
        first.cancel()
        await asyncio.sleep(0)
    story.may_switch.set()
    await asyncio.gather(first, story.run("7", "b"), return_exceptions=True)
    assert first.cancelled()
    assert story.events == ["to 7", "b begins", "b ends"]
