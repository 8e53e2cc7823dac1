"""The protocol between an engine and a fork server: requests for workers, and their ends, over a Unix socket.

Each connection is for one worker. When the engine closes it, or has ended, that worker is killed. One more connection
keeps the fork server waiting for work, and may end it.
"""

import hashlib
import json
import os
import resource
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

SOCKET = "fork_server.sock"
"""The file of the socket in the data directory."""

PATIENCE_S = 5.0
"""Seconds that either side waits for an answer which takes milliseconds; one that is stopped does not answer."""

END = b"."
"""The byte with which an engine ends the fork server."""
READY = b"!"
"""The byte with which it says that workers with these libraries are ready, so that the next need not check as much."""

_PACKAGE = Path(__file__).parent.parent
_VARIABLES = (
    *("CUDA", "HF_", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NVIDIA_", "OMP_", "OPENBLAS_"),
    *("PYTHON", "PYTORCH_", "TMPDIR", "TORCH", "TRANSFORMERS_", "TRITON_", "XDG_CACHE_HOME"),
)
"""Prefixes of environment variables that libraries read while they are imported."""

_LENGTH = 8
"""Bytes of a request's length."""
_CODE = 4
"""Bytes of an exit code."""


@dataclass(frozen=True)
class Request:
    """A request of an engine; it comes with the standard output and error of the worker."""

    libraries: str
    """`digest_of_libraries` of who asks. Others have imported something else."""
    start: str = ""
    """The worker's `Start` as JSON; empty to keep the fork server waiting."""
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""
    """The worker's working directory."""


def digest_of_libraries(variables: Mapping[str, str]) -> str:
    """Identify what a process imports with these environment variables, and how: Python, all packages and our code.

    What a forked worker has from the fork server and not from who asks counts too: limits and processors. Raises
    OSError if files are being replaced.
    """
    files = sorted(_PACKAGE.rglob("*.py"))
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    facts = {
        "program": [sys.executable, sys.version],
        "code": [[str(file), file.stat().st_mtime_ns, file.stat().st_size] for file in files],
        "packages": [[each, Path(each).stat().st_mtime_ns] for each in sorted(packages)],
        "variables": {name: value for name, value in variables.items() if name.startswith(_VARIABLES)},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "processors": sorted(os.sched_getaffinity(0)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@contextmanager
def _path_of(home: Path) -> Iterator[str]:
    """Give a path of the socket that is short enough, however long that of the directory is."""
    directory = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{SOCKET}"
    finally:
        os.close(directory)


def listen(home: Path) -> socket.socket:
    """Listen at the socket in the data directory, in place of who listened before. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (home / SOCKET).unlink(missing_ok=True)
    mask = os.umask(0o177)  # for this user alone
    try:
        with _path_of(home) as path:
            listener.bind(path)
    finally:
        os.umask(mask)
    listener.listen()
    return listener


def connect(home: Path, request: Request, files: Sequence[int] = ()) -> socket.socket | None:
    """Connect to the fork server, and send it a request and open files; None if nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(PATIENCE_S)
    try:
        with _path_of(home) as path:
            connection.connect(path)
        body = json.dumps(asdict(request)).encode()  # of any bytes that a variable may hold
        socket.send_fds(connection, [len(body).to_bytes(_LENGTH, "big")], list(files))
        connection.sendall(body)
    except OSError:
        connection.close()
        return None
    return connection


def accept(listener: socket.socket) -> tuple[socket.socket, Request, list[int]] | None:
    """Accept a connection and read its request; None if the process that connected is gone, or says nothing."""
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE_S)
    files: list[int] = []
    try:
        length, files, _, _ = socket.recv_fds(connection, _LENGTH, 2)
        return connection, Request(**json.loads(_read(connection, int.from_bytes(length, "big")))), files
    except (OSError, ValueError, TypeError):
        connection.close()
        for number in files:
            os.close(number)
        return None


def _read(connection: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes. Raises ConnectionError if there are fewer."""
    body = b""
    while len(body) < size:
        more = connection.recv(size - len(body))
        if not more:
            raise ConnectionError(f"the connection ended after {len(body)} of {size} bytes")
        body += more
    return body


def send_worker(connection: socket.socket, pid: int, process: int) -> None:
    """Answer with a worker: its process id, and a file descriptor of the process."""
    with suppress(OSError):  # who asked for it is gone, which the next look at the connection shows
        socket.send_fds(connection, [pid.to_bytes(_CODE, "big")], [process])


def receive_worker(connection: socket.socket) -> tuple[int, int] | None:
    """Undo `send_worker`; None if there is no worker."""
    try:
        answer, files, _, _ = socket.recv_fds(connection, _CODE, 1)
    except OSError:
        return None
    return (int.from_bytes(answer, "big"), files[0]) if len(answer) == _CODE and files else None


def send_exit_code(connection: socket.socket, code: int) -> None:
    """Tell how a worker has ended."""
    with suppress(OSError):
        connection.sendall(code.to_bytes(_CODE, "big", signed=True))


def receive_exit_code(connection: socket.socket) -> int | None:
    """Undo `send_exit_code`, of a worker that has ended; None if the fork server has ended as well."""
    try:
        return int.from_bytes(_read(connection, _CODE), "big", signed=True)
    except OSError:
        return None
