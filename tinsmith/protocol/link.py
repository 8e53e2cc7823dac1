"""The ZeroMQ sockets between the server and one run of the engine process: one for messages both ways, one for heartbeats.

The server binds a fresh address for every engine that it starts, so nothing meant for a dead engine reaches the next. The socket
file lies in a directory that only the user of the server can enter. Queues have no limit: who sends must not block.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import zmq
import zmq.asyncio

from tinsmith.errors import ConfigError, EngineUnavailableError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Alive

_LINGER_MS = 1000
"""How long closing a socket may wait for its last message to leave."""

_BELL_BYTES = 4096
"""More than `wake` can have written since the last look is read with the next."""

_MAX_PATH_BYTES = 100
"""Unix socket paths end at 107 bytes."""


def heartbeat_address(address: str) -> str:
    """Where heartbeats go to the server that bound `address`."""
    return f"{address}-beat"


class EngineLink:
    """The engine's end. Used by one thread, but for `wake`."""

    def __init__(self, address: str) -> None:
        """Connect to the server that bound `address`."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._bell, self._rope = os.pipe()
        for end in (self._bell, self._rope):
            os.set_blocking(end, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._bell, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[Message]:
        """All messages that have arrived, oldest first; if there is none, wait for one, or for `wake`, for at most `timeout_s` seconds."""
        messages: list[Message] = []
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._bell in ready:
            os.read(self._bell, _BELL_BYTES)
        if self._socket in ready:
            while self._socket.poll(0):
                messages.append(Message.from_frames(self._socket.recv_multipart()))
        return messages

    def wake(self) -> None:
        """End a `receive` that waits, or else the next one that would. May be called by any thread."""
        with contextlib.suppress(BlockingIOError):  # it has been rung so often that nobody can miss it
            os.write(self._rope, b"!")

    def send(self, message: Message) -> None:
        """Queue a message to the server."""
        self._socket.send_multipart(message.to_frames())

    def close(self) -> None:
        """Close after the last message left, or could not."""
        self._socket.close(linger=_LINGER_MS)
        self._context.term()
        os.close(self._bell)


class ServerLink:
    """The server's end, bound to a new `address`. Iterate it with `async for` to receive."""

    def __init__(self) -> None:
        """Bind. Raises ConfigError if the temporary directory has too long a path for a socket."""
        self._directory = Path(tempfile.mkdtemp(prefix="tinsmith-"))
        path = self._directory / "engine"
        if len(os.fsencode(heartbeat_address(str(path)))) > _MAX_PATH_BYTES:
            shutil.rmtree(self._directory)
            raise ConfigError(f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes; set TMPDIR to a shorter directory")
        self.address = f"ipc://{path}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._heartbeats = self._context.socket(zmq.PULL)
        self._heartbeats.bind(heartbeat_address(self.address))

    async def receive(self) -> Message:
        """The next message of the engine."""
        return Message.from_frames(await self._socket.recv_multipart())

    async def receive_heartbeat(self) -> Alive:
        """The next heartbeat of the engine."""
        message = Message.from_frames(await self._heartbeats.recv_multipart())
        assert isinstance(message, Alive)
        return message

    async def send(self, message: Message) -> None:
        """Queue a message to the engine. Raises EngineUnavailableError if none is connected."""
        try:
            await self._socket.send_multipart(message.to_frames(), flags=zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            raise EngineUnavailableError("the engine is not connected; send the request again") from error

    def close(self) -> None:
        """Close at once; messages that have not left are dropped."""
        self._socket.close(linger=0)
        self._heartbeats.close(linger=0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)
