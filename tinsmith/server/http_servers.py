"""Several HTTP servers in front of one hub: processes of their own that accept from one socket.

The kernel gives a connection to whichever accepts first. One that ends, or hangs, is started again; its clients connect
to another meanwhile, and find what they wait for there (`front.py`).
"""

import asyncio
import logging
import socket
import sys
from contextlib import suppress

import orjson

from tinsmith.config import to_tree
from tinsmith.protocol.child_process import WATCH_S, exit_text, next_delay_s
from tinsmith.server.calling import HubAnswers
from tinsmith.server.hub import Hub
from tinsmith.server.waiters import set_within

log = logging.getLogger(__name__)

_END_S = 10.0
"""Seconds that one may take to end."""


class HttpServers:
    """The HTTP servers, as many as `http_servers` says."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._processes: set[asyncio.subprocess.Process] = set()

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Keep them running, with what they accept from, until `end`. The sockets are closed then."""
        await asyncio.gather(*(self._keep(number, sockets) for number in range(self._hub.config.server.http_servers)))
        for each in sockets:
            each.close()

    def end(self, at_once: bool = False) -> None:
        """Let them accept nothing more and end once their replies are out, or at once."""
        self._hub.stopping.set()
        for process in self._processes if at_once else ():
            _kill(process)

    async def _keep(self, number: int, sockets: list[socket.socket]) -> None:
        delay_s = 0.0
        while not await set_within(self._hub.stopping, delay_s):
            exit_code, was_ready = await self._run_once(sockets)
            if not self._hub.stopping.is_set():
                delay_s = next_delay_s(delay_s, was_ready)
                log.error(
                    "HTTP server %d has ended unexpectedly (%s); it is restarted in %.0f s",
                    *(number, exit_text(exit_code), delay_s),
                )

    async def _run_once(self, sockets: list[socket.socket]) -> tuple[int, bool]:
        """Run one: its exit code, and whether it ever was ready."""
        answering = HubAnswers(self._hub)
        ours, theirs = socket.socketpair()
        await answering.connect(ours)
        with theirs:
            passed = [theirs.fileno(), *(each.fileno() for each in sockets)]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "tinsmith.server.http_process", *map(str, passed)),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=passed,
            )
        self._processes.add(process)
        try:
            assert process.stdin is not None
            process.stdin.write(orjson.dumps(to_tree(self._hub.config)))
            process.stdin.close()
            was_ready = await self._watched(process, answering)
            return await process.wait(), was_ready
        finally:
            _kill(process)
            self._processes.discard(process)
            answering.close()

    async def _watched(self, process: asyncio.subprocess.Process, answering: HubAnswers) -> bool:
        """Wait for its end; returns whether it ever was ready. One that is silent, or does not end, is killed.

        Silence is counted in rounds, as `EngineProcess` does.
        """
        exited = asyncio.create_task(process.wait())
        limit_s, silent_s, was_ready = self._hub.config.server.engine_hung_s, 0.0, False
        while not exited.done():
            answering.heard = False
            await asyncio.wait([exited], timeout=WATCH_S)
            was_ready |= answering.heard
            silent_s = 0.0 if answering.heard or not was_ready else silent_s + WATCH_S
            if self._hub.stopping.is_set():
                await asyncio.wait([exited], timeout=_END_S)
                _kill(process)
            elif silent_s >= limit_s:
                log.error("an HTTP server has shown no sign of life for %.0f s and is killed", silent_s)
                _kill(process)
        return was_ready


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
