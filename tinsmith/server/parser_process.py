"""A process beside the server that decompresses and parses large request bodies.

Protobuf, JSON and base64 hold the interpreter's lock while they work on megabytes: in a thread of the server they would
stop every other request. The server sends one body at a time over a socket; clients take turns, and so do the sessions
of each. The process ends with the socket, and is started again if it dies; one that is stopped is killed.
"""

import asyncio
import contextlib
import importlib
import io
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tinsmith.errors import EngineUnavailableError, TinsmithError
from tinsmith.logs import start_logging
from tinsmith.protocol.child_process import WATCH_S, end_with_parent, is_stopped, leave_signals_to_server
from tinsmith.sampling.turns import Turns
from tinsmith.wire.compression import decompress

log = logging.getLogger(__name__)

_SIZES = struct.Struct("!QQ")
"""Bytes of the pickled job and of the body that follows it."""
_SIZE = struct.Struct("!Q")
"""Bytes of the pickled answer."""

_NEEDED = ("tinsmith.wire.forward_backward", "tinsmith.server.sample_checks")
"""Imported before the first body comes."""

_NICE = 5
"""Priority below those that serve, train and sample: only senders of large bodies wait for it."""

Result = TypeVar("Result")


class ParserProcess:
    """The server's end, for one event loop. One thread talks to the process, one body after the other."""

    def __init__(self, log_format: str = "text") -> None:
        """Nothing runs yet: the process, whose log is in that format, starts with `start`, or with the first body."""
        self._log_format = log_format
        self._waiting: dict[str, Turns[asyncio.Future[None]]] = {}
        """Bodies whose turn has not come, by client; the first client is next."""
        self._busy = False
        self._thread = ThreadPoolExecutor(1, "parser")
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(self) -> None:
        self._thread.submit(self._connected)

    async def run(
        self,
        parse: Callable[..., Result],
        body: bytes,
        encoding: str,
        max_bytes: int,
        *args: object,
        client: str = "",
        session: str = "",
    ) -> Result:
        """`parse(body, *args)`, computed in the process.

        `parse` is a function of a module; arguments and result are pickled.

        The next body is of the client, then of its session, served longest ago: many sessions get no more turns.

        With `encoding` "zstd" the body is first decompressed, to at most `max_bytes`. A result may refer to the body:
        as it was sent, it is not copied back. Raises as `decompress` and `parse`, and EngineUnavailableError if the
        process dies.
        """
        job = pickle.dumps((parse, args, encoding, max_bytes))
        if self._busy:
            await self._turn(client, session)
        self._busy = True
        watching = asyncio.create_task(self._watch())
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, job, body)
        finally:
            watching.cancel()
            self._give_turn()
        if isinstance(answer, TinsmithError):
            raise answer
        result: Result = answer
        return result

    async def _watch(self) -> None:
        """End the process if it is stopped: it would never answer."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        if self._process is not None and is_stopped(self._process.pid):
            self._process.kill()

    async def _turn(self, client: str, session: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, Turns()).add(session, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it was given the turn just now
                self._give_turn()
            raise

    def _give_turn(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            sessions = self._waiting.pop(client)
            turn = next(iter(sessions))
            sessions.take(sessions.sessions[0], turn)
            if sessions:
                self._waiting[client] = sessions
            if not turn.done():  # its request may have been given up
                turn.set_result(None)
                return
        self._busy = False

    def close(self) -> None:
        """End the process, after the body that it is at."""
        self._thread.submit(self._end_if_stopped)
        self._thread.submit(self._disconnect)
        self._thread.shutdown()

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                arguments = str(theirs.fileno()), self._log_format
                command = [sys.executable, "-P", "-m", "tinsmith.server.parser_process", *arguments]
                # A process group of its own: Ctrl-C in a terminal is for the server, which then ends this process.
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
                )
        return self._socket

    def _disconnect(self) -> int:
        """The exit code of the process."""
        if self._socket is None or self._process is None:
            return 0
        self._socket.close()
        self._socket = None
        return self._process.wait()

    def _ask(self, job: bytes, body: bytes) -> Any:
        try:
            connection = self._connected()
            connection.sendall(_SIZES.pack(len(job), len(body)) + job)
            connection.sendall(body)
            answer = _receive(connection, *_SIZE.unpack(_receive(connection, _SIZE.size)))
        except (EOFError, OSError) as error:
            exit_code = self._disconnect()
            log.warning(
                "the process that parses large requests has ended (exit code %d); the next one starts it again",
                exit_code,
            )
            raise EngineUnavailableError(
                f"the process that parses large requests ended with exit code {exit_code} at this one; "
                "send the request again"
            ) from error
        return _AnswerReader(io.BytesIO(answer), body).load()


class _AnswerWriter(pickle.Pickler):
    """Leaves out the body, which the server has."""

    def __init__(self, file: io.BytesIO, body: bytes | None) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._body = body

    def persistent_id(self, value: object) -> str | None:
        return "body" if self._body is not None and value is self._body else None


class _AnswerReader(pickle.Unpickler):
    """Puts the body in again."""

    def __init__(self, file: io.BytesIO, body: bytes) -> None:
        super().__init__(file)
        self._body = body

    def persistent_load(self, name: str) -> bytes:
        return self._body


def _receive(connection: socket.socket, size: int) -> bytearray:
    """Receive `size` bytes. Raises EOFError if the other end closes before."""
    received = bytearray(size)
    view = memoryview(received)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return received


def _answer(job: bytes | bytearray, body: bytes) -> bytes:
    """The pickled result of a job, or the error that it raised."""
    parse, args, encoding, max_bytes = pickle.loads(job)
    answer = io.BytesIO()
    try:
        plain = decompress(body, max_bytes) if encoding == "zstd" else body
        result = parse(plain, *args)
    except TinsmithError as error:
        result = error
    except Exception as error:
        log.exception("a request could not be parsed")
        result = TinsmithError(f"internal error of the server: {type(error).__name__}; see its log")
    _AnswerWriter(answer, body).dump(result)
    return answer.getvalue()


def main() -> None:
    """Answer the server at the socket of the given descriptor, until it is closed."""
    leave_signals_to_server()
    end_with_parent()
    start_logging("parser", form=sys.argv[2])
    os.nice(_NICE)
    for module in _NEEDED:
        importlib.import_module(module)
    # Suppressed: the server has closed the socket, or is gone.
    with socket.socket(fileno=int(sys.argv[1])) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            job_bytes, body_bytes = _SIZES.unpack(_receive(connection, _SIZES.size))
            answer = _answer(_receive(connection, job_bytes), bytes(_receive(connection, body_bytes)))
            connection.sendall(_SIZE.pack(len(answer)))
            connection.sendall(answer)


if __name__ == "__main__":
    main()
