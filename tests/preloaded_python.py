"""The small program that tests start in place of Python: it asks for a process that has the libraries imported, and
stands for it.

See `tests/preloaded.py`. It imports little of the standard library, so that it starts in some 20 ms.
"""

import array
import json
import os
import resource
import signal
import socket
import sys
from contextlib import suppress

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)


def main(python: str, directory: str) -> None:
    """Run the program of the command line in a process that is forked for it, and end as that ends.

    With other options of Python than -B and -u, which such a process cannot obey, this becomes `python`, and so it does
    if nobody forks.
    """
    # Of multiprocessing and of pytest-xdist; such a process writes little byte code, and by lines
    while sys.argv[1:2] in (["-B"], ["-u"]):
        del sys.argv[1]
    first = sys.argv[2:3] if sys.argv[1:2] == ["-P"] else sys.argv[1:2]
    has_options = not first or (first[0].startswith("-") and first[0] != "-m" and sys.argv[1] != "-c")
    if has_options or not os.access(f"{directory}/requests", os.F_OK):
        os.execv(python, [python, *sys.argv[1:]])
    early: list[int] = []
    for passed_on in PASSED_ON:
        signal.signal(passed_on, lambda number, _: early.append(number))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(f"{directory}/requests")
    _ask(connection)
    for passed_on in PASSED_ON:
        signal.signal(passed_on, lambda number, _: _send(connection, number))
    for number in early:
        _send(connection, number)
    answer = connection.recv(4, socket.MSG_WAITALL)
    code = int.from_bytes(answer, "big", signed=True) if len(answer) == 4 else 1
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _ask(connection: socket.socket) -> None:
    """Give away the command line, the environment and all open files, and wait until the process runs."""
    with os.scandir("/proc/self/fd") as entries:
        listed = [int(entry.name) for entry in entries]
    files = [number for number in listed if number != connection.fileno() and _is_open(number)]
    mask = os.umask(0)
    request = {
        "pid": os.getpid(),
        "arguments": sys.argv[1:],
        "directory": os.path.realpath("."),
        "environment": dict(os.environ),
        "umask": mask,
        "files": files,
        "limits": [(number, resource.getrlimit(number)) for number in LIMITS],
    }
    body = json.dumps(request).encode()
    connection.sendmsg(
        [len(body).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    )
    connection.sendall(body)
    if len(connection.recv(4, socket.MSG_WAITALL)) < 4:
        os._exit(1)
    for number in files:
        os.close(number)


def _is_open(number: int) -> bool:
    """Whether this is more than the file that listed the open files."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _send(connection: socket.socket, number: int) -> None:
    """Pass a signal on, unless the process has just ended."""
    with suppress(BrokenPipeError):
        connection.send(bytes([number]))
