"""The engine as a child process: started with a fresh link, watched, restarted when it dies, shut down with the server."""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Literal

import orjson

from tinsmith.config import Config, to_tree
from tinsmith.engine.link import ServerLink
from tinsmith.engine.messages import Message, Ready, Shutdown, Wake
from tinsmith.errors import ConfigError, EngineUnavailableError

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_LOADING = "the engine is loading its models"
_TERMINATE_S = 1.0
"""How long a terminated engine may take before it is killed."""

_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Threads of a pass that wait for each other sleep: where other processes need the cores, those that spin make it ten times slower."""


class EngineProcess:
    """Keeps one engine running."""

    def __init__(self, config: Config, on_message: Callable[[Message], None], on_absent: Callable[[str], Awaitable[None]]) -> None:
        """`on_message` gets every message. `on_absent` is awaited before each start and after each death, with what happened."""
        self._config = config
        self._on_message = on_message
        self._on_absent = on_absent
        self._link: ServerLink | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()
        self.state: Literal["starting", "ready", "down"] = "starting"
        self.reason = _LOADING
        """Why the engine is not ready, if it is not."""

    @property
    def is_ready(self) -> bool:
        """Whether the engine can take work."""
        return self.state == "ready"

    async def run(self) -> None:
        """Start the engine and restart it until `stop`. Raises ConfigError if the first one ends before it is ready."""
        happened = "the server stopped before this operation was finished"
        delay_s = 0.0
        ever_ready = False
        while True:
            await self._on_absent(happened)
            if await self._stopped_within(delay_s):
                return
            exit_code, was_ready = await self._run_once()
            if self._stop.is_set():
                return
            ever_ready |= was_ready
            happened = f"the engine process ended unexpectedly ({_describe(exit_code)})"
            if not ever_ready:
                raise ConfigError(f"{happened} before it could take work; its output above says why")
            delay_s = _FIRST_DELAY_S if was_ready else min(2 * delay_s, _LONGEST_DELAY_S)
            self.reason = f"{happened}; it is restarted in {delay_s:.0f} s"
            log.error(self.reason)

    async def _stopped_within(self, delay_s: float) -> bool:
        try:
            async with asyncio.timeout(delay_s):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    async def _run_once(self) -> tuple[int, bool]:
        """One life of an engine: its exit code, and whether it was ever ready."""
        link = ServerLink()
        command = [sys.executable, "-m", "tinsmith.engine", link.address, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env={**_ENVIRONMENT, **os.environ})
        self._link, self._process = link, process
        self.state, self.reason = "starting", _LOADING
        reader = asyncio.create_task(self._read(link))
        try:
            if self._stop.is_set():
                process.terminate()
            assert process.stdin is not None
            process.stdin.write(orjson.dumps(to_tree(self._config)))
            process.stdin.close()
            return await process.wait(), self.is_ready
        finally:
            self._link = self._process = None
            self.state, self.reason = "down", "the engine process has ended"
            reader.cancel()
            await asyncio.wait([reader])
            link.close()

    async def _read(self, link: ServerLink) -> None:
        async for message in link:
            self._on_message(message)
            if isinstance(message, Ready):
                self.state, self.reason = "ready", ""
                log.info("the engine is ready: %s", ", ".join(model["name"] for model in message.models))
                await link.send(Wake())

    async def send(self, message: Message) -> None:
        """Send to a ready engine. Raises EngineUnavailableError if there is none."""
        if not self.is_ready or self._link is None:
            raise EngineUnavailableError(f"{self.reason}; send the request again")
        await self._link.send(message)

    async def notify(self, message: Message) -> None:
        """Send to the engine if there is one that is ready. One that is not finds everything in the store when it is."""
        if self.is_ready and self._link is not None:
            await self._link.send(message)

    async def stop(self) -> None:
        """Let the engine finish the pass that is running and exit; after `shutdown_s` end it."""
        self._stop.set()
        process, link = self._process, self._link
        if process is None or link is None:
            return
        if not self.is_ready:
            await _end(process)
            return
        try:
            await link.send(Shutdown())
            async with asyncio.timeout(self._config.server.shutdown_s):
                await process.wait()
        except (EngineUnavailableError, TimeoutError):
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    log.warning("the engine did not exit by itself and is terminated")
    process.terminate()
    try:
        async with asyncio.timeout(_TERMINATE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _describe(exit_code: int) -> str:
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
