"""The ZeroMQ sockets between a process and its child: for messages both ways, heartbeats, and a worker's questions.

The parent binds a new socket for every child, so nothing meant for a dead one reaches the next. On one host it is a
file in a directory that only the user can enter (`own_directory.py`). Between hosts it is a TCP port that lets in
nobody but the child (`gate.py`), and only once: a child whose connection has broken may have lost messages, and must
end. Queues have no limit, because a sender must not block.

A parent's sockets belong to the context of its process, which is never ended: where a child was killed while it
connected, ending a context of their own has waited for ever.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zmq
import zmq.asyncio

from tinsmith.errors import ConfigError, EngineUnavailableError
from tinsmith.protocol.gate import ChildKeys, Gate
from tinsmith.protocol.messages import Message
from tinsmith.protocol.own_directory import OwnDirectory
from tinsmith.protocol.place import listening_at

_LINGER_MS = 1000
"""Milliseconds that closing a socket may wait for its last message to leave."""

_BELL_BYTES = 4096
"""More than `wake` can have written since the last look is read with the next."""

_PREFIX = "tinsmith-io-"

_MAX_PATH_BYTES = 107


_PING_MS = 5_000
"""Between two signs of life that ZeroMQ asks a parent on another host for."""

_SILENT_MS = 60_000
"""Milliseconds without one after which the connection is lost: the host may have vanished without a word."""

_REFUSED = "the process that started this one has refused its connection or is gone"

_TCP = "tcp://"

_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


def message_address(address: str) -> str:
    """Return the message address of the parent that bound `address`: `ipc://FILE`, or `tcp://HOST:PORT,PORT,PORT`."""
    return address.partition(",")[0]


def heartbeat_address(address: str) -> str:
    """Return the address of heartbeats to the parent that bound `address`."""
    return _other_address(address, 1, "beat")


def question_address(address: str) -> str:
    """Return the address of questions to the parent that bound `address`."""
    return _other_address(address, 2, "ask")


def _other_address(address: str, number: int, name: str) -> str:
    if not address.startswith(_TCP):
        return f"{address}-{name}"
    messages, *ports = address.split(",")
    return f"{messages.rpartition(':')[0]}:{ports[number - 1]}"


class ChildLink:
    """The child's end. Used by one thread, but for `wake`."""

    def __init__(self, address: str, keys: ChildKeys | None = None) -> None:
        """Connect to the parent that bound `address`; between hosts with the `keys` that it has made."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._monitor: zmq.Socket[bytes] | None = None
        """Reports the loss of a connection between hosts. On one host only the parent's own end can break it."""
        if keys is not None:
            keys.show(self._socket)
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_MS)
            self._monitor = self._socket.get_monitor_socket(_LOST)
        self._socket.connect(message_address(address))
        self._bell, self._rope = os.pipe()
        for end in (self._bell, self._rope):
            os.set_blocking(end, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)
        if self._monitor is not None:
            self._poller.register(self._monitor, zmq.POLLIN)

    def listen_to(self, other: "ParentLink") -> None:
        """End a `receive` that waits also when `other` has something to receive."""
        for socket in other.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def forget(self, other: "ParentLink") -> None:
        for socket in other.sockets:
            self._poller.unregister(socket)

    def receive(self, timeout_s: float) -> list[Message]:
        """Return the messages that have arrived, oldest first; if none, wait up to `timeout_s` for one, or `wake`.

        Raises EngineUnavailableError if none can come any more, because the connection to a parent on another host is
        lost.
        """
        ready = dict(self._poller.poll(max(0, math.ceil(timeout_s * 1000))))
        if self._bell in ready:
            os.read(self._bell, _BELL_BYTES)
        if self._socket in ready:
            return list(_arrived(self._socket))
        if self._monitor in ready:
            raise EngineUnavailableError(_REFUSED)
        return []

    def wake(self) -> None:
        """End a `receive` that waits, or else the next one that would. May be called by any thread."""
        with contextlib.suppress(BlockingIOError):  # it has been rung so often that nobody can miss it
            os.write(self._rope, b"!")

    def send(self, message: Message) -> None:
        """Queue a message to the parent. Raises EngineUnavailableError if the parent has refused this process.

        ZeroMQ takes its queue away from a socket whose connection is refused: a send that waited for one would wait for
        ever.
        """
        try:
            self._socket.send_multipart(message.to_frames(), flags=zmq.NOBLOCK)
        except zmq.Again as error:
            raise EngineUnavailableError(_REFUSED) from error

    def close(self) -> None:
        """Close after the last message left, or could not."""
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        self._context.term()
        os.close(self._bell)
        os.close(self._rope)


class ParentLink:
    """The parent's end, bound to a new `address`. For one thread, which `ChildLink.listen_to` wakes up."""

    def __init__(self, host: str | None = None) -> None:
        """Bind, for a child on this host or, with the address of this `host`, for one on any that reaches it.

        Raises ConfigError if the temporary directory has too long a path for a socket, or if `host` is no address of
        this one.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._heartbeats = context.socket(zmq.PULL)
        self._questions: zmq.Socket[bytes] | None = (questions := context.socket(zmq.REP))
        self._directory: OwnDirectory | None = None
        self._gate: Gate | None = None
        if host is None:
            self._directory, self.address = _new_address()
            self._socket.bind(self.address)
            self._heartbeats.bind(heartbeat_address(self.address))
            questions.bind(question_address(self.address))
        else:
            self._gate = Gate()
            self._gate.guard(self._socket, once=True)
            self._gate.guard(self._heartbeats, once=False)
            self._gate.guard(questions, once=False)
            ports = [_bind(socket, host) for socket in (self._socket, self._heartbeats, questions)]
            self.address = f"{_TCP}{host}:{','.join(str(port) for port in ports)}"

    @property
    def keys(self) -> ChildKeys | None:
        """Secret keys that the child needs to connect; None for a child on this host."""
        return None if self._gate is None else self._gate.keys

    @property
    def sockets(self) -> "tuple[zmq.Socket[bytes], ...]":
        return self._socket, self._heartbeats

    def take_questions(self) -> "zmq.Socket[bytes]":
        """Hand over the socket of the child's questions. The caller may give it to a thread, and closes it."""
        assert self._questions is not None
        questions, self._questions = self._questions, None
        return questions

    def receive(self) -> list[Message]:
        return list(_arrived(self._socket))

    def heartbeats(self) -> list[Message]:
        """Return what the child's threads beside its loop have sent: `Alive` and reports."""
        return list(_arrived(self._heartbeats))

    def send(self, message: Message) -> None:
        """Queue a message to the child. What is sent to one that has died is dropped: its watcher fails what it had."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(message.to_frames(), flags=zmq.NOBLOCK)

    def close(self) -> None:
        """Close at once; messages that have not left are dropped."""
        self._socket.close(linger=0)
        self._heartbeats.close(linger=0)
        if self._questions is not None:
            self._questions.close(linger=0)
        if self._directory is not None:
            self._directory.close()
        if self._gate is not None:
            self._gate.close()


class ServerLink:
    """The parent's end in an event loop, bound to a new `address`."""

    def __init__(self) -> None:
        """Bind. Raises ConfigError if the temporary directory has too long a path for a socket."""
        self._directory, self.address = _new_address()
        context = zmq.asyncio.Context.instance()
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._heartbeats = context.socket(zmq.PULL)
        self._heartbeats.bind(heartbeat_address(self.address))

    async def receive(self) -> Message:
        return Message.from_frames(await self._socket.recv_multipart())

    async def receive_heartbeat(self) -> Message:
        """Return what the child's threads beside its loop send next: `Alive` or a report."""
        return Message.from_frames(await self._heartbeats.recv_multipart())

    async def send(self, message: Message) -> None:
        """Queue a message to the child. Raises EngineUnavailableError if none is connected."""
        try:
            await self._socket.send_multipart(message.to_frames(), flags=zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise EngineUnavailableError("the engine is not connected; send the request again") from error

    def close(self) -> None:
        self._socket.close(linger=0)
        self._heartbeats.close(linger=0)
        self._directory.close()


def _new_address() -> tuple[OwnDirectory, str]:
    directory = OwnDirectory(_PREFIX, Path(tempfile.gettempdir()))
    path = directory.path / "child"
    if len(os.fsencode(heartbeat_address(str(path)))) > _MAX_PATH_BYTES:
        directory.close()
        raise ConfigError(
            f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes; set TMPDIR to a shorter directory"
        )
    return directory, f"ipc://{path}"


def _bind(socket: "zmq.Socket[bytes]", host: str) -> int:
    """Bind to a free port of this host; returns its number."""
    with listening_at(host):
        socket.bind(f"{_TCP}{host}:*")
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def _arrived(socket: "zmq.Socket[bytes]") -> Iterator[Message]:
    """Return the messages that a socket has received, oldest first, without waiting."""
    while socket.poll(0):
        yield Message.from_frames(socket.recv_multipart())
