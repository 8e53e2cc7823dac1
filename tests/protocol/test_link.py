"""Messages between a process and its child over real sockets.

Invariant: Nobody but its child connects to a port of a process, whatever keys it has, and a child that is refused ends.
"""

import asyncio
import contextlib
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from tests.preloaded import REAL_PYTHON
from tinsmith.errors import ConfigError, EngineUnavailableError
from tinsmith.protocol.gate import ChildKeys
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ChildLink, ParentLink, ServerLink, heartbeat_address, message_address
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Alive, Done, Ready, Sample, SampleDone, Shutdown, Wake

T = TypeVar("T")

FOREVER_S = 3600.0
"""A wait of this length would end the test by its time-out."""

LONG_S = 120.0
"""How long anything here may take on a busy machine."""

DONE = Done("m/1", "protobuf", None, None, b"\x0a\x00")


UP: list[Message] = [Ready([{"name": "tiny"}]), DONE, SampleDone("s/0", 7, b"\x00\xff")]
DOWN: list[Message] = [Wake(["m", "n"]), Sample("s/0", 7, "tiny", None, 1, False, b"body"), Shutdown()]


def test_a_server_gets_all_in_order_and_a_wait_for_it_is_ended_by_a_wake_or_its_time() -> None:
    async def run() -> None:
        server = ServerLink()
        engine = ChildLink(server.address)
        for message in UP:
            engine.send(message)
        assert [await server.receive() for _ in UP] == UP
        for message in DOWN:
            await server.send(message)
        arrived: list[Message] = []
        while len(arrived) < len(DOWN):
            arrived += await asyncio.to_thread(engine.receive, FOREVER_S)
        assert arrived == DOWN
        started = time.monotonic()
        assert engine.receive(0.1) == engine.receive(0.0) == []
        assert time.monotonic() - started > 0.05
        waiting = asyncio.create_task(asyncio.to_thread(engine.receive, FOREVER_S))
        await asyncio.sleep(0.05)
        engine.wake()
        assert await waiting == []
        for _ in range(10_000):
            engine.wake()
        assert engine.receive(FOREVER_S) == []  # it is kept for the next wait
        engine.close()
        server.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", [ServerLink, ParentLink])
def test_a_socket_is_the_users_alone_at_its_own_address_and_leaves_nothing_behind(
    kind: type[ServerLink | ParentLink],
) -> None:
    """And sending to nobody does not block."""

    async def run() -> None:
        first, second = kind(), kind()
        assert first.address != second.address
        if isinstance(first, ServerLink):
            with pytest.raises(EngineUnavailableError):
                await first.send(Wake([]))
        for link in (first, second):
            directory = Path(link.address.removeprefix("ipc://")).parent
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            link.close()
            assert not directory.exists()

    asyncio.run(run())


def eventually(link: ParentLink, look: Callable[[], list[T]], count: int = 1) -> list[T]:
    """So many of what a parent gets, when they have arrived."""
    found: list[T] = []
    deadline = time.monotonic() + LONG_S
    while len(found) < count:
        assert time.monotonic() < deadline, found
        found += look()
        time.sleep(0.005)
    return found


def received(link: ParentLink, count: int) -> list[Message]:
    """So many messages, when they have arrived."""
    return eventually(link, link.receive, count)


HERE, OVER_TCP = None, "127.0.0.1"


@contextlib.contextmanager
def parent_and_child(host: str | None = HERE) -> Iterator[tuple[ParentLink, ChildLink]]:
    parent = ParentLink(host)
    child = ChildLink(parent.address, parent.keys)
    yield parent, child
    child.close()
    parent.close()


@pytest.mark.parametrize("host", [HERE, OVER_TCP])
def test_a_parent_without_an_event_loop_gets_all_in_order_and_heartbeats_beside_and_never_waits(
    host: str | None,
) -> None:
    with parent_and_child(host) as (parent, child):
        assert parent.receive() == []
        for message in UP:
            child.send(message)
        assert received(parent, len(UP)) == UP
        for message in DOWN:
            parent.send(message)
        arrived: list[Message] = []
        while len(arrived) < len(DOWN):
            arrived += child.receive(FOREVER_S)
        assert arrived == DOWN
        heartbeat = Heartbeat(parent.address, keys=parent.keys)
        heartbeat.worker_busy_s = 4.0
        heartbeat.start()
        child.send(DONE)
        assert eventually(parent, parent.heartbeats)[0] == Alive(4.0)
        assert received(parent, 1) == [DONE]


@pytest.mark.parametrize("host", [HERE, OVER_TCP])
def test_what_is_sent_to_a_child_that_never_came_or_has_gone_is_dropped_and_blocks_nobody(host: str | None) -> None:
    parent = ParentLink(host)
    for _ in range(1000):
        parent.send(DONE)
    child = ChildLink(parent.address, parent.keys)
    child.send(DONE)
    assert received(parent, 1) == [DONE]
    child.close()
    for _ in range(1000):
        parent.send(DONE)
    parent.close()


def test_a_process_in_the_middle_wakes_up_for_its_parent_and_for_its_child() -> None:
    """As the engine does, between server and worker: no matter whose message or heartbeat, no wait is longer than that
    of the first."""
    with parent_and_child() as (server, engine), parent_and_child() as (worker_link, worker):
        engine.listen_to(worker_link)

        def spoken_after(speak: Callable[[], None]) -> list[Message]:
            """What the engine gets of the server when it waits while that is said."""
            later = threading.Timer(0.05, speak)
            later.start()
            try:
                return engine.receive(FOREVER_S)
            finally:
                later.join()

        assert spoken_after(lambda: server.send(DONE)) == [DONE]
        assert spoken_after(lambda: worker.send(Shutdown())) == []
        assert received(worker_link, 1) == [Shutdown()]
        assert spoken_after(engine.wake) == []
        assert spoken_after(Heartbeat(worker_link.address).start) == []
        assert len(worker_link.heartbeats()) > 0
        engine.forget(worker_link)
        worker.send(Shutdown())
        started = time.monotonic()
        assert engine.receive(0.2) == []
        assert time.monotonic() - started > 0.1
        assert received(worker_link, 1) == [Shutdown()]


BEATS = """
import os, sys, time
from tinsmith.protocol import heartbeat
from tinsmith.protocol.gate import ChildKeys
heartbeat.BEAT_S, heartbeat._FORGOTTEN_S = 0.1, 2.0
kind = sys.argv[2]
beat = heartbeat.Heartbeat(sys.argv[1], os.getppid() if kind == "ends" else None, ChildKeys(*sys.argv[3:]))
beat.worker_busy_s = {"stays": 1.0, "ends": 2.0}[kind]  # by which the test tells them apart
beat.start()
time.sleep(3600)
"""


def test_only_a_child_that_is_to_end_with_its_parent_ends_when_that_is_gone_whatever_it_computes() -> None:
    """Of a parent on another host. A process that only tells how it is, as one that runs tests does, is never ended."""
    parent = ParentLink(OVER_TCP)
    keys = parent.keys
    assert keys is not None
    with contextlib.ExitStack() as children:

        def started(kind: str) -> subprocess.Popen[bytes]:
            command = [REAL_PYTHON, "-c", BEATS, parent.address, kind, keys.parent, keys.public, keys.secret]
            child = children.enter_context(subprocess.Popen(command))
            children.callback(child.kill)
            return child

        lasting, ending = started("stays"), started("ends")
        taken, deadline = {1.0: 0, 2.0: 0}, time.monotonic() + LONG_S
        while min(taken.values()) < 30:  # which takes more than the two seconds: as long as they are taken, both go on
            assert time.monotonic() < deadline
            for beat in parent.heartbeats():
                assert isinstance(beat, Alive)
                taken[beat.busy_s] += 1
            time.sleep(0.01)
        assert [ending.poll(), lasting.poll()] == [None, None]
        parent.close()
        assert ending.wait(LONG_S) == 1
        time.sleep(1.0)  # more than it could have waited for longer than the other
        assert lasting.poll() is None


def send_until_refused(*children: ChildLink) -> None:
    """Send as much as the parent takes, of all in turns."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        for child in children:
            child.send(DONE)
        time.sleep(0.005)


def test_a_child_that_is_refused_gets_an_error_and_does_not_wait_for_ever() -> None:
    with contextlib.closing(ParentLink()) as parent, contextlib.ExitStack() as links:
        address = heartbeat_address(parent.address)  # a socket that takes no child of this kind
        # On a busy machine, ZeroMQ 4.3.5 loses one refusal of about 2,000: the connection ends, and the child's socket
        # goes on queueing.
        strangers = [links.enter_context(contextlib.closing(ChildLink(address))) for _ in range(4)]
        with pytest.raises(EngineUnavailableError, match="refused"):
            send_until_refused(*strangers)
        child = links.enter_context(contextlib.closing(ChildLink(parent.address)))
        child.send(DONE)
        assert received(parent, 1) == [DONE]


def knock(kind: int, address: str, keys: ChildKeys | None) -> int:
    """Try to connect and to say something, as a program would that is no child; returns how that ended, as an event of
    ZeroMQ."""
    with zmq.Context() as context, context.socket(kind) as socket:
        if keys is not None:
            keys.show(socket)
        socket.setsockopt(zmq.LINGER, 0)
        failed = (
            zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        with socket.get_monitor_socket(failed | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            socket.connect(address)
            socket.send_multipart(Alive(1.0).to_frames())
            return int(parse_monitor_message(monitor.recv_multipart())["event"])


def test_nobody_but_its_child_can_connect_to_the_ports_of_a_parent() -> None:
    parent, other = ParentLink(OVER_TCP), ParentLink(OVER_TCP)
    assert parent.keys is not None
    assert other.keys is not None
    public, secret = (key.decode() for key in zmq.curve_keypair())
    strangers = [
        None,
        ChildKeys(public, public, secret),
        ChildKeys(parent.keys.parent, public, secret),  # knows the parent, who does not know it
        other.keys,
        replace(other.keys, parent=parent.keys.parent),
        replace(parent.keys, secret=secret),
    ]
    for keys in strangers:
        assert knock(zmq.PAIR, message_address(parent.address), keys) != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert knock(zmq.PUSH, heartbeat_address(parent.address), keys) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    child = ChildLink(parent.address, parent.keys)
    child.send(DONE)
    assert received(parent, 1) == [DONE]
    assert parent.heartbeats() == []
    assert knock(zmq.PUSH, heartbeat_address(parent.address), parent.keys) == zmq.EVENT_HANDSHAKE_SUCCEEDED
    child.close()
    parent.close()
    other.close()


def test_a_second_child_with_the_keys_of_the_first_is_refused_and_so_is_one_whose_parent_is_gone() -> None:
    with parent_and_child(OVER_TCP) as (parent, child):
        child.send(DONE)
        assert received(parent, 1) == [DONE]
        second = ChildLink(parent.address, parent.keys)
        with pytest.raises(EngineUnavailableError, match="refused"):
            send_until_refused(second)
        with pytest.raises(EngineUnavailableError, match="refused"):
            second.receive(FOREVER_S)
        second.close()
        parent.send(Shutdown())
        assert child.receive(FOREVER_S) == [Shutdown()]
        assert parent.receive() == []
    parent = ParentLink(OVER_TCP)
    with contextlib.closing(ChildLink(parent.address, parent.keys)) as child:
        child.send(DONE)
        assert received(parent, 1) == [DONE]
        parent.close()
        with pytest.raises(EngineUnavailableError, match="gone"):
            child.receive(FOREVER_S)


def test_a_place_where_nobody_can_listen_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot listen at 203"):
        ParentLink("203.0.113.1")
    directory = tmp_path / ("long" * 30)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with pytest.raises(ConfigError, match="set TMPDIR to a shorter directory"):
        ParentLink()
    assert list(directory.iterdir()) == []
