"""Python processes that begin with torch, transformers and this package imported, which saves ten seconds of a core.

A test run starts this module as a process. It imports these libraries once, waits for requests and forks itself for
each. Whatever tests and product start as `sys.executable` is then a small program (`tests/preloaded_python.py`) that
asks for such a process, gives it its command line, environment, directory and open files, passes on the signals that it
gets, and ends as the process ends. So are the processes of pytest-xdist that run the tests.

`REAL_PYTHON` starts Python as a user does: for tests of what is imported, or of how much memory a process takes.
"""

import array
import atexit
import gc
import io
import json
import multiprocessing
import os
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

REAL_PYTHON = sys.executable
"""Python itself."""

MOST_FILES = 250
"""Open files that one message can pass on: Linux takes no more than 253."""

MOST_NUMBERS = 2**16
"""The table of a process's open files is as long as the highest number in it."""


DIRECTORY = "TINSMITH_TEST_PRELOADED"
"""The environment variable that names the directory of the small program to all processes of a test run."""

FIRST = "TINSMITH_TEST_FIRST"
"""The environment variable that names a module for such a process to import before it runs its program."""

PRELOADED = (
    "alembic.context",
    "hypothesis",
    "moto.server",
    "peft",
    "tests.bases",
    "tinker.cli",
    "tinsmith.cli",
    "tinsmith.engine.__main__",
    "tinsmith.sampling.vllm.verify",
    "tinsmith.server.http_side",
    "tinsmith.server.main",
    "tinsmith.server.until_stopped",
    "tinsmith.server.parser_process",
    "tinsmith.worker.bases",
    "tinsmith.worker.loop",
)
"""Modules of which tests start many processes, or which many tests import."""


def replace_python(serve: bool) -> None:
    """Let `sys.executable` be the small program of this test run: it starts a fork if `serve`, else Python itself.

    Call it before modules are imported that keep `sys.executable`.
    """
    if DIRECTORY not in os.environ:
        directory = Path(tempfile.mkdtemp(prefix="preloaded-"))
        atexit.register(_remove, directory, os.getpid())
        program = directory / "python"
        program.write_text(
            f"#!{REAL_PYTHON} -IS\n"
            f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
            f"from preloaded_python import main\nmain({REAL_PYTHON!r}, {str(directory)!r})\n"
        )
        program.chmod(0o755)
        os.environ[DIRECTORY] = str(directory)
        if serve:
            _start_server(directory)
    _be_started_as(Path(os.environ[DIRECTORY]))


def _be_started_as(directory: Path) -> None:
    sys.executable = str(directory / "python")
    multiprocessing.set_executable(sys.executable)


def _remove(directory: Path, owner: int) -> None:
    """Delete it at the end of the process that has made it, not of those that it has forked."""
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)


def _start_server(directory: Path) -> None:
    """Start the process that forks itself. It ends with this one, which holds the other end of its standard input."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(directory / "requests"))  # a small program that is early waits until it is accepted
        listener.listen(128)
        number = listener.fileno()
        command = [REAL_PYTHON, "-m", "tests.preloaded", str(directory), str(number)]
        root = Path(__file__).parent.parent
        server = subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[number]
        )
    atexit.register(server.communicate)


def main(directory: str, number: str) -> None:
    """Import the modules, then fork for each request until standard input is closed."""
    _be_started_as(Path(directory))
    for module in PRELOADED:
        import_module(module)
    gc.freeze()  # a collection in a forked process would copy the pages of all that was imported
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test run, with which this ends
    lifeline = os.dup(0)
    os.dup2(1, 0)
    _Forks(socket.socket(fileno=int(number)), lifeline, Path(directory)).run()


def process_behind(pid: int) -> int:
    """The process that the small program `pid` stands for; `pid` itself if it is another program, or has ended.

    Benchmarks start nothing but other programs.
    """
    if sys.executable == REAL_PYTHON:
        return pid
    while True:
        with suppress(OSError):
            return int((Path(sys.executable).parent / str(pid)).read_text())
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return pid
        if sys.executable.encode() not in command.split(b"\0"):
            return pid
        time.sleep(0.01)  # it has not asked for its process yet


class _Forks:
    """The child that forks itself, and the processes that it has forked."""

    def __init__(self, listener: socket.socket, lifeline: int, directory: Path) -> None:
        self.listener = listener
        self.lifeline = lifeline
        self.directory = directory
        self.asked: dict[int, tuple[socket.socket, int]] = {}
        """By the process that was forked: the connection of the small program, and its process id."""
        self.child_ended, self.wakes = os.pipe()

    def run(self) -> None:
        """Fork on request until the test run has ended; then end whatever is left."""
        os.set_blocking(self.wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wakes)
        while True:
            connections = {connection.fileno(): pid for pid, (connection, _) in self.asked.items()}
            ready, _, _ = select.select([self.listener.fileno(), self.lifeline, self.child_ended, *connections], [], [])
            if self.lifeline in ready:
                self._end()
            for number in ready:
                if number in connections:
                    self._pass_on_signals(connections[number])
            if self.child_ended in ready:
                os.read(self.child_ended, 4096)
                self._report_ends()
            if self.listener.fileno() in ready:
                self._fork(self.listener.accept()[0])

    def _end(self) -> None:
        for pid in self.asked:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.directory, ignore_errors=True)  # the test run may have been killed
        os._exit(0)

    def _pass_on_signals(self, pid: int) -> None:
        """Send the process the signals that the small program got. If that was killed, kill it."""
        try:
            signals = self.asked[pid][0].recv(64)
        except ConnectionError:
            signals = b""
        for number in signals or (signal.SIGKILL,):
            os.kill(pid, number)
        if not signals:
            self._forget(pid)

    def _report_ends(self) -> None:
        """Tell the small programs how their processes have ended."""
        with suppress(ChildProcessError):  # there are no others
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid in self.asked:
                    with suppress(OSError):  # that of the small program has ended, too
                        self.asked[pid][0].sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))
                    self._forget(pid)

    def _forget(self, pid: int) -> None:
        connection, program = self.asked.pop(pid)
        connection.close()
        (self.directory / str(program)).unlink(missing_ok=True)

    def _fork(self, connection: socket.socket) -> None:
        received = _receive(connection)
        if received is None:
            connection.close()
            return
        request, files = received
        pid = os.fork()
        if pid == 0:
            try:
                _become(request, files)
            finally:
                os._exit(1)
        for file in files:
            os.close(file)
        unseen = self.directory / "next"
        unseen.write_text(str(pid))
        unseen.rename(self.directory / str(request["pid"]))
        self.asked[pid] = connection, request["pid"]
        with suppress(OSError):  # the small program has been killed: the next look at its connection shows it
            connection.sendall(bytes(4))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """What a small program asks for, and its open files; None if it was killed before it had asked."""
    numbers = array.array("i")
    try:
        data, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(MOST_FILES * numbers.itemsize))
        for _, _, block in ancillary:
            numbers.frombytes(block)
        size = int.from_bytes(data, "big")
        body = connection.recv(size, socket.MSG_WAITALL)
    except ConnectionError:
        size, body = 1, b""
    if len(body) < max(size, 1):
        for number in numbers:
            os.close(number)
        return None
    return json.loads(body), list(numbers)


def _close_all_but(kept: set[int]) -> None:
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):  # the one that listed them
                os.close(int(path.name))


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Run the program that was asked for in this process, and end with it."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Above all numbers that they are to have
    aside = range(min(hard, MOST_NUMBERS) - len(files), min(hard, MOST_NUMBERS))
    for source, number in zip(files, aside, strict=True):
        os.dup2(source, number)
    _close_all_but(set(aside))
    for source, number in zip(aside, request["files"], strict=True):
        os.dup2(source, number)
        os.close(source)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, limits in request["limits"]:
        resource.setrlimit(number, tuple(limits))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), line_buffering=True)
        for number in (1, 2)
    )
    if FIRST in os.environ:
        import_module(os.environ[FIRST])
    program, real = request["pid"], os.getppid
    os.getppid = lambda: _parent_of(program)
    os.register_at_fork(after_in_child=lambda: setattr(os, "getppid", real))
    try:
        _execute(request["arguments"])
    finally:
        os._exit(_finish(sys.exc_info()[1]))


def _parent_of(pid: int) -> int:
    """The parent of a small program, for the process behind it; 1 if the small program has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    return 1


def _finish(error: BaseException | None) -> int:
    """Do what Python does when a program has ended, by this error or without one: the exit code."""
    code = 0
    match error:
        case None:
            pass
        case SystemExit(code=int(number)):
            code = number
        case SystemExit(code=said):
            code = int(said is not None)
            if said is not None:
                print(said, file=sys.stderr)
        case KeyboardInterrupt():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        case _:
            traceback.print_exception(error)
            code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    return code & 0xFF


def _execute(arguments: list[str]) -> None:
    match arguments:
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.path.insert(0, "")
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
        case ["-P", *rest]:
            _run_module(rest)
        case ["-m", *_]:
            sys.path.insert(0, str(Path.cwd()))
            _run_module(arguments)
        case [file, *_]:
            sys.argv = arguments
            sys.path.insert(0, str(Path(file).resolve().parent))
            runpy.run_path(file, run_name="__main__")


def _run_module(arguments: list[str]) -> None:
    """Run what stands behind `-m`."""
    name, sys.argv = arguments[1], arguments[1:]
    for module in (name, f"{name}.__main__"):  # Python warns of one that was imported before
        if not hasattr(sys.modules.get(module), "__path__"):
            sys.modules.pop(module, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # Not this `__main__`, so that what is forked finds it under its name
    import_module("tests.preloaded").main(*sys.argv[1:])
