"""`tinsmith serve` as a process of its own, on a port of its own choice."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import httpx

T = TypeVar("T")

START_S = 90.0
"""How long a server may take to load its models on a busy machine."""


class Server:
    """A server process and its log."""

    def __init__(self, log: IO[str], data_dir: Path, options: list[str]) -> None:
        command = [sys.executable, "-c", "from tinsmith.cli import main; main()", "serve", "--port", "0", "--data-dir", str(data_dir)]
        self.log = Path(log.name)
        self.process = subprocess.Popen([*command, *options], stdout=log, stderr=log)

    @property
    def url(self) -> str:
        """Its address, as soon as it listens."""
        return self._wait_for(lambda: re.search(r"listening on (http://\S+),", self.log.read_text()))[1]

    def client(self) -> httpx.Client:
        """A client of the API without the SDK."""
        return httpx.Client(base_url=f"{self.url}/api/v1", timeout=60)

    def wait_for_health(self, status: int = 200) -> httpx.Response:
        """The first answer of healthz with that status."""

        def healthz() -> httpx.Response | None:
            reply = client.get("healthz")
            return reply if reply.status_code == status else None

        with self.client() as client:
            return self._wait_for(healthz)

    def engine_pid(self) -> int:
        """The engine is the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def _wait_for(self, look: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if (found := look()) is not None:
                return found
            time.sleep(0.02)
        raise AssertionError(self.log.read_text())


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[Server]:
    """A server whose log and data lie in `directory`; it is stopped at the end."""
    with (directory / "server.log").open("w") as log:
        server = Server(log, directory / "data", list(options))
        try:
            yield server
        finally:
            server.process.terminate()
            try:
                server.process.wait(timeout=15)
            finally:
                server.process.kill()
