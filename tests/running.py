"""The program as a person runs it: `tinsmith serve` on a port that it chooses, and commands that end."""

import io
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import httpx
import psutil
import pytest

from tests.preloaded import REAL_PYTHON, process_behind
from tinsmith.cli import main

T = TypeVar("T")

START_S = 600.0
"""How long tests wait for a server to start or a program to end: seconds, but minutes on a very busy machine."""

PROGRAM = [sys.executable, "-c", "from tinsmith.cli import main; main()"]
"""The program as the installed script starts it; its processes begin with libraries imported (`tests/preloaded.py`)."""

REAL_PROGRAM = [REAL_PYTHON, *PROGRAM[1:]]
"""The same, of which each process imports what it needs."""


def limited_program(limit: int, most: int) -> list[str]:
    """The program, which first sets a soft limit of `resource` for itself.

    In this process it would hold for other tests, too.
    """
    code = f"import resource; resource.setrlimit({limit}, ({most}, resource.getrlimit({limit})[1])); {PROGRAM[2]}"
    return [PROGRAM[0], "-c", code]


def tinsmith(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The program in a process of its own.

    A command that needs torch then takes seconds to import it: see `tinsmith_here`.
    """
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, check=False, timeout=START_S)


def tinsmith_here(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """The program in this process: the same `main`, the same lines, the same exit code."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["tinsmith", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(
        ["tinsmith", *arguments], int(ended.value.code or 0), out.getvalue(), err.getvalue()
    )


class Server:
    """A server process and its log."""

    def __init__(self, log: IO[str], data_dir: Path, options: list[str], program: list[str] = PROGRAM) -> None:
        self.log = Path(log.name)
        self.data_dir = data_dir
        self._output = log
        self._command = [*program, "serve", "--port", "0", "--data-dir", str(data_dir), *options]
        self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def start_again(self) -> None:
        """Start the server again at its address, when it has ended; returns when it listens."""
        port = self.url.rpartition(":")[2]
        self.process.wait(timeout=START_S)
        starts = self.log.read_text().count("listening on ")
        self.process = subprocess.Popen([*self._command, "--port", port], stdout=self._output, stderr=self._output)
        self._wait_for(lambda: self.log.read_text().count("listening on ") > starts or None)

    @property
    def url(self) -> str:
        """Its address, as soon as it listens."""
        return self._wait_for(lambda: re.search(r"listening on (https?://\S+),", self.log.read_text()))[1]

    def client(self) -> httpx.Client:
        """A client of the API without the SDK."""
        return httpx.Client(base_url=f"{self.url}/api/v1", timeout=START_S)

    def wait_for_health(self, status: int = 200) -> httpx.Response:
        """The first answer of healthz with that status."""

        def healthz() -> httpx.Response | None:
            with suppress(httpx.TransportError):  # it has ended, which its log explains
                reply = client.get("healthz")
                return reply if reply.status_code == status else None
            return None

        with self.client() as client:
            return self._wait_for(healthz)

    def wait_for_log(self, text: str) -> None:
        """Wait until the log has this text."""
        self._wait_for(lambda: text in self.log.read_text() or None)

    def wait_for_status(self, seen: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first status that `seen` accepts."""

        def status() -> dict[str, Any] | None:
            reply: dict[str, Any] = client.get("status").json()
            return reply if seen(reply) else None

        with self.client() as client:
            return self._wait_for(status)

    def wait_for_metric(self, line: str) -> None:
        """Wait until its metrics have this line."""
        self._wait_for(lambda: line in httpx.get(f"{self.url}/metrics", timeout=START_S).text.splitlines() or None)

    @property
    def pid(self) -> int:
        """The server's own process."""
        return process_behind(self.process.pid)

    def engine_pid(self) -> int:
        """The engine, which is a child of the server."""
        return self.child_of(self.pid, "tinsmith.engine")

    def worker_pid(self) -> int:
        """The only worker, once it has been told what it works for."""
        return self._wait_for(lambda: next(iter(self.worker_pids()), None))

    def worker_pids(self) -> list[int]:
        """The workers, in the order of their ranks. Others may stand by."""
        found = dict[str, int]()
        for child in self._workers():
            with suppress(psutil.Error):  # it has ended meanwhile
                pid = process_behind(child.pid) if "tinsmith.worker" in child.cmdline() else child.pid
                found[psutil.Process(pid).name()] = pid
        return [found[name] for name in sorted(found, key=lambda name: (len(name), name)) if name.startswith("worker")]

    def _workers(self) -> Iterator[psutil.Process]:
        """Children of the engine, and those of its fork server."""
        yield from psutil.Process(self.engine_pid()).children()
        for each in psutil.process_iter(["cmdline"]):
            if (
                "tinsmith.worker.fork_server" in (command := each.info["cmdline"] or ())
                and str(self.data_dir) in command
            ):
                with suppress(psutil.Error):
                    yield from psutil.Process(process_behind(each.pid)).children()

    def http_pids(self, count: int) -> list[int]:
        """The processes that answer HTTP, once there are `count`, where they are not the server's own."""
        return self._children_of(self.pid, "tinsmith.server.http_process", count)

    def child_of(self, pid: int, module: str) -> int:
        """The process that runs this module, once it has been started."""
        return self._children_of(pid, module, 1)[0]

    def _children_of(self, pid: int, module: str, count: int) -> list[int]:
        def look() -> list[int] | None:
            with suppress(psutil.Error):  # one has ended meanwhile
                children = sorted(psutil.Process(pid).children(), key=psutil.Process.create_time)  # one may stand by
                found = [child for child in children if module in child.cmdline()]
                return [process_behind(each.pid) for each in found] if len(found) >= count else None
            return None

        return self._wait_for(look)

    def _wait_for(self, look: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if (found := look()) is not None:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())


@contextmanager
def serving(directory: Path, *options: str, program: list[str] = PROGRAM) -> Iterator[Server]:
    """A server whose log and data lie in `directory`; it is stopped at the end."""
    with (directory / "server.log").open("w") as log:
        server = Server(log, directory / "data", list(options), program)
        try:
            yield server
        finally:
            server.process.terminate()
            try:
                server.process.wait(timeout=START_S)
            finally:
                server.process.kill()
