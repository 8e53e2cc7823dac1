"""Messages between server and engine over a real socket."""

import asyncio
import stat
import time
from pathlib import Path

import pytest

from tinsmith.errors import EngineUnavailableError
from tinsmith.protocol.link import EngineLink, ServerLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Done, Ready, Sample, SampleDone, Shutdown, Wake

FOREVER_S = 3600.0
"""A wait of this length would end the test by its time-out."""

DONE = Done("m/1", "protobuf", None, None, b"\x0a\x00")


def test_messages_arrive_in_order_both_ways() -> None:
    async def run() -> None:
        server = ServerLink()
        engine = EngineLink(server.address)
        for message in (Ready([{"name": "tiny"}]), DONE, SampleDone("s/0", 7, b"\x00\xff")):
            engine.send(message)
        assert [await server.receive() for _ in range(3)] == [Ready([{"name": "tiny"}]), DONE, SampleDone("s/0", 7, b"\x00\xff")]
        sent = [Wake(), Sample("s/0", 7, "tiny", None, 1, b"body"), Shutdown()]
        for reply in sent:
            await server.send(reply)
        received: list[Message] = []
        while len(received) < 3:
            received += await asyncio.to_thread(engine.receive, 5.0)
        assert received == sent
        engine.close()
        server.close()

    asyncio.run(run())


def test_a_wake_ends_the_wait_and_is_kept_for_the_next() -> None:
    async def run() -> None:
        server = ServerLink()
        engine = EngineLink(server.address)
        waiting = asyncio.create_task(asyncio.to_thread(engine.receive, FOREVER_S))
        await asyncio.sleep(0.05)
        engine.wake()
        assert await waiting == []
        for _ in range(100_000):
            engine.wake()
        assert engine.receive(FOREVER_S) == []
        engine.close()
        server.close()

    asyncio.run(run())


def test_receiving_waits_no_longer_than_asked() -> None:
    async def run() -> None:
        server = ServerLink()
        engine = EngineLink(server.address)
        started = time.monotonic()
        assert engine.receive(0.1) == []
        assert time.monotonic() - started > 0.05
        assert engine.receive(0.0) == []
        engine.close()
        server.close()

    asyncio.run(run())


def test_sending_to_nobody_does_not_block() -> None:
    async def run() -> None:
        server = ServerLink()
        with pytest.raises(EngineUnavailableError):
            await server.send(Wake())
        server.close()

    asyncio.run(run())


def test_only_the_user_can_reach_the_socket_and_it_leaves_nothing_behind() -> None:
    async def run() -> None:
        server = ServerLink()
        directory = Path(server.address.removeprefix("ipc://")).parent
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        server.close()
        assert not directory.exists()

    asyncio.run(run())


def test_every_link_has_its_own_address() -> None:
    async def run() -> None:
        first, second = ServerLink(), ServerLink()
        assert first.address != second.address
        first.close()
        second.close()

    asyncio.run(run())
