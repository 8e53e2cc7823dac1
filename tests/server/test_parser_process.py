"""The process that parses large bodies, as a process. That it ends with its server is in `test_supervision.py`.

Invariant: No session delays another by what it sends: bodies are parsed, images decoded and texts sampled in turn.
Also: `tests/worker/test_background.py`, `tests/worker/test_samples.py`.
"""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
import zstandard

from tests.preloaded import process_behind
from tests.server.serving import forward_backward_body, parsers
from tinsmith.config import RequestsConfig
from tinsmith.errors import EngineUnavailableError, UserError
from tinsmith.server.parser_process import ParserProcess
from tinsmith.wire.compression import TooLargeError
from tinsmith.wire.forward_backward import ReceivedRequest, receive

LONG_S = 60.0

LIMITS = RequestsConfig()
BODY = forward_backward_body("s:train:0", 7)


class Parser(ParserProcess):
    """One with a short way to ask it."""

    async def receive(
        self, body: bytes, encoding: str = "identity", most: int = 2**20, client: str = "", session: str = ""
    ) -> ReceivedRequest:
        return await self.run(receive, body, encoding, most, LIMITS, client=client, session=session)


@pytest.fixture
async def parser() -> AsyncIterator[Parser]:
    parser = Parser()
    yield parser
    parser.close()
    assert parsers() == []


async def test_what_is_wrong_with_a_body_is_raised_here_and_the_next_is_parsed(parser: Parser) -> None:
    with pytest.raises(UserError, match="is not a protobuf ForwardBackwardRequest"):
        await parser.receive(b"\xff\xff")
    with pytest.raises(TooLargeError, match="larger than 1024 bytes after decompression"):
        await parser.receive(zstandard.compress(bytes(2000)), "zstd", 1024)
    too_many = await parser.receive(b"\x0a\x01m" + b"\x1a\x00" * 5000)
    assert (too_many.key.model_id, too_many.stored.payload, "max_datums" in (too_many.refused or "")) == (
        "m",
        b"",
        True,
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        # One that gives up takes no turn.
        (["one first", "one many", "one many", "one gone", "one many", "one few"], "first many few many many"),
        # A client with many sessions has no more turns than one with a single session.
        (["crowd a", "crowd b", "crowd c", "crowd c", "crowd d", "one x", "one x"], "a b x c x d c"),
    ],
)
async def test_clients_and_their_sessions_take_turns(parser: Parser, asked: list[str], expected: str) -> None:
    order = list[str]()

    async def ask(client: str, session: str) -> None:
        await parser.receive(BODY, client=client, session=session)
        order.append(session)

    tasks = [asyncio.create_task(ask(*each.split())) for each in asked]
    await asyncio.sleep(0)
    for each, task in zip(asked, tasks, strict=True):
        if each.endswith("gone"):
            task.cancel()
    await asyncio.wait(tasks)
    assert order == expected.split()
    await ask("one", "again")


async def receive_or_end(parser: Parser, pids: set[int]) -> None:
    """Let the body be parsed, and end these processes: where nobody has, the test would wait for ever."""
    try:
        async with asyncio.timeout(LONG_S):
            await parser.receive(BODY)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_one_that_dies_or_is_stopped_is_started_again(parser: Parser, sign: signal.Signals) -> None:
    assert (await parser.receive(BODY)).key.seq_id == 7
    (child,) = parsers()
    behind = process_behind(child.pid)
    os.kill(behind, sign)
    if sign == signal.SIGSTOP and behind != child.pid:
        os.kill(child.pid, sign)  # at which the server looks
    with pytest.raises(EngineUnavailableError, match="ended with exit code -9 at this one; send the request again"):
        await receive_or_end(parser, {behind, child.pid})
    assert (await parser.receive(BODY)).key.seq_id == 7


async def test_one_that_is_stopped_while_it_is_idle_delays_no_end() -> None:
    parser = Parser()
    await parser.receive(BODY)
    (child,) = parsers()
    pids = {process_behind(child.pid), child.pid}
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    ending = threading.Thread(target=parser.close)
    ending.start()
    ending.join(LONG_S)
    hangs = ending.is_alive()
    for pid in pids if hangs else ():
        os.kill(pid, signal.SIGKILL)
    assert not hangs
