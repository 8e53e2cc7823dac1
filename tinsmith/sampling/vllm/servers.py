"""vLLM servers: those that we start, supervise and restart, and those that were running before.

    starting -> ready -> (lost) -> down -> starting ...

Each time that a server gets ready it begins a new `Life`, which knows nothing of the weights and pictures that it had before.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cachetools import LRUCache

from tinsmith.errors import TinsmithError
from tinsmith.sampling.inside_vllm import TransferKind
from tinsmith.sampling.vllm.connection import Connection, RefusedError, ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.gate import Gate
from tinsmith.sampling.vllm.last_words import last_words
from tinsmith.sampling.vllm.slots import Slots
from tinsmith.sampling.vllm.transfers import Transfer

log = logging.getLogger(__name__)

_POLL_S = 0.25
_STARTS_WITHIN_S = 900.0
"""A server that loads a large model takes minutes."""
_LOOK_EVERY_S = 2.0
"""How often a server that has samples to do is asked whether it still does anything."""
_ANSWERS_WITHIN_S = 10.0
"""How long a server that is doubted, or that was given, may take to answer."""
_LONGEST_DELAY_S = 30.0
_MOST_TOGETHER = 64
"""Samples of one prompt in one request, where a server has so many slots."""
_KNOWN_PICTURES = 2**31
"""Bytes of pixel values that a server is taken to remember; vLLM's own limit is 4 GiB."""


@dataclass(frozen=True)
class Launch:
    """How to start a server."""

    command: list[str]
    """All but the socket."""
    environment: Mapping[str, str]
    sockets: Path
    """A directory that only the user can enter."""
    name: str
    """Different for every server."""
    log: Path
    transfer_kind: TransferKind
    """How full weights get there."""


@dataclass(eq=False)
class Life:
    """A server from one start to its end, and what it holds. Nothing that belongs to one life can reach the next."""

    connection: Connection
    slots: Slots
    """For samples."""
    spare_slot: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """One more, to compare new weights in."""
    most_together: int
    """Samples of one prompt in one request. vLLM refuses more than it computes side by side."""
    is_ours: bool
    """Whether we have started it, so that it begins with the base's weights."""
    transfer_kind: TransferKind
    transfer: Transfer | None = None
    """The way in for full weights, once some have been sent."""
    adapters: dict[str, "asyncio.Task[str]"] = field(default_factory=dict)
    """By the key of the weights: loads the adapter, and gives the name it has there."""
    checks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """By the key of the weights: compares the canary."""
    gate: Gate = field(default_factory=Gate)
    """To the weights that it computes with."""
    label: str | None = None
    """What it calls these weights in its replies; None if it does not say, or was not asked."""
    identified: bool = False
    """Whether it was asked."""
    number: int = field(default_factory=itertools.count().__next__)
    """Different for every life."""
    begun: set[str] = field(default_factory=set)
    """Names of requests that have been sent, and can be given up there."""
    pictures: LRUCache[str, int] = field(default_factory=lambda: LRUCache(_KNOWN_PICTURES, getsizeof=lambda size: size))
    """Size in bytes, by hash, of the pictures that it has seen."""
    arriving: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """By hash: brings a picture there."""

    async def answers(self) -> bool:
        """Whether the server says that it and its engine are alive."""
        try:
            await self.connection.get("/health")
        except (ServerLostError, RefusedError, ServerFailedError):
            return False
        return True

    async def is_silent(self, for_s: float) -> bool:
        """Whether its engine, which answers between two steps, says nothing for so long. A process that hangs still takes requests."""
        try:
            async with asyncio.timeout(for_s):
                await self.connection.get("/is_paused")
        except TimeoutError:
            return True
        except (ServerLostError, RefusedError, ServerFailedError):  # its samples notice that themselves
            return False
        return False


class Server:
    """One vLLM server through all its lives."""

    def __init__(self, source: Launch | str, slots: int, hung_s: float, changed: asyncio.Condition) -> None:
        """`source` says how to start it, or is the URL of one that is not ours. It gets at most `slots` samples at a time.

        With samples to do and silent for `hung_s` seconds it is taken for lost. `changed` is notified whenever `state` is another.
        """
        self.source = source
        self.slots = slots
        self.hung_s = hung_s
        self.changed = changed
        self.state: Literal["starting", "ready", "down"] = "starting"
        self.reason = "it is starting"
        """Why it is not ready."""
        self.life: Life | None = None
        self.load = 0
        """Sequences that are being sampled there, or wait for it."""
        self.process: asyncio.subprocess.Process | None = None
        self._starts = itertools.count()
        self._doubted = asyncio.Event()

    def doubt(self, life: Life, reason: str) -> None:
        """A request of `life` was lost: send no more before it is clear whether the server still answers."""
        if self.life is life and self.state == "ready":
            self.state, self.reason = "starting", reason
            self._doubted.set()

    async def run(self) -> None:
        """Keep it running, or in touch, for ever. One that was ready is started again at once, and what waits goes on waiting."""
        delay_s = 0.0
        while True:
            await self._change("starting", "it is starting")
            try:
                was_ready = await self._live()
                reason = self._why_down()
            except (OSError, ValueError) as error:  # ValueError: an address that is none
                was_ready, reason = False, f"a vLLM server cannot be started, or reached: {error}"
            delay_s = 0.0 if was_ready else min(max(1.0, 2 * delay_s), _LONGEST_DELAY_S)
            log.error("%s; next attempt in %.0f s", reason, delay_s)
            if not was_ready:
                await self._change("down", reason)
                await asyncio.sleep(delay_s)

    async def _live(self) -> bool:
        """From a start to the end; whether it was ever ready in between."""
        is_ours = isinstance(self.source, Launch)
        kind: TransferKind = self.source.transfer_kind if isinstance(self.source, Launch) else "file"
        life = Life(Connection(await self._start()), Slots(self.slots), min(self.slots, _MOST_TOGETHER), is_ours, kind)
        try:
            was_ready = await self._gets_ready(life)
            if was_ready:
                await self._stay(life)
        finally:
            await life.connection.close()
            await self._end()
        return was_ready

    async def _change(self, state: Literal["starting", "ready", "down"], reason: str) -> None:
        async with self.changed:
            self.state, self.reason = state, reason
            self.changed.notify_all()

    async def _start(self) -> str:
        """The address to reach it at."""
        source = self.source
        if isinstance(source, str):
            return source
        socket = source.sockets / f"{source.name}-{next(self._starts)}"
        source.log.parent.mkdir(parents=True, exist_ok=True)
        with source.log.open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(
                *source.command,
                *_seed(source.command),
                "--uds",
                str(socket),
                env=source.environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        return f"unix:{socket}"

    async def _gets_ready(self, life: Life) -> bool:
        limit_s = _ANSWERS_WITHIN_S if isinstance(self.source, str) else _STARTS_WITHIN_S
        started = time.monotonic()
        if not await self._answers_within(life, limit_s):
            return False
        self.life = life
        self._doubted.clear()
        await self._change("ready", "")
        log.info("the vLLM server at %s is ready, %.1f s", life.connection.address, time.monotonic() - started)
        return True

    async def _stay(self, life: Life) -> None:
        """Until the server has gone, or hangs."""
        hangs = asyncio.create_task(self._hang(life))
        try:
            while True:
                gone: list[asyncio.Task[Any]] = [asyncio.create_task(self._doubted.wait())]
                if self.process is not None:
                    gone.append(asyncio.create_task(self.process.wait()))
                try:
                    await asyncio.wait((hangs, *gone), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for task in gone:
                        task.cancel()
                if hangs.done() or not await self._answers_within(life, _ANSWERS_WITHIN_S):
                    return
                self._doubted.clear()
                await self._change("ready", "")
        finally:
            hangs.cancel()

    async def _hang(self, life: Life) -> None:
        """Return when the server has samples to do, and its engine has been silent for too long.

        Also when one has gone that is not ours, and that we do not see end: one that comes back has lost all weights.
        """
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if self.load and await life.is_silent(self.hung_s):
                log.error("the vLLM server at %s hangs: it answered nothing for %g s", life.connection.address, self.hung_s)
                return
            if not self.load and not life.is_ours and not await self._answers_once(life):
                return

    async def _answers_once(self, life: Life) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                return await life.answers()
        return False

    async def _answers_within(self, life: Life, limit_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.process is None or self.process.returncode is None:
                    if await life.answers():
                        return True
                    await asyncio.sleep(_POLL_S)
        return False

    async def _end(self) -> None:
        """Kill our process with all that it started: vLLM's own processes outlive it otherwise."""
        process = self.process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the launcher has made a group of its own
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # or had no time to
        await process.wait()

    def _why_down(self) -> str:
        if isinstance(self.source, str) or self.process is None:
            return f"no vLLM server answers at {self.source}"
        words = last_words(self.source.log.read_bytes())
        return f"a vLLM server ended (exit code {self.process.returncode}); {self.source.log} says: {words}"


def _seed(command: list[str]) -> list[str]:
    """Samples without a seed must differ from other servers', and from those before a restart: by itself vLLM begins with 0."""
    given = any(option.partition("=")[0] == "--seed" for option in command)
    return [] if given else ["--seed", str(secrets.randbits(31))]


class Servers:
    """All servers of one base model, and which of them a request goes to. Made in the event loop that keeps them running."""

    def __init__(self, servers: list[Server], changed: asyncio.Condition) -> None:
        self.all = servers
        self.tasks = [asyncio.create_task(server.run()) for server in servers]
        self.changed = changed
        self.homes: LRUCache[bytes, Server] = LRUCache(2**16)
        """Where prompts went, by the key of their last full block."""

    async def pick(self, keys: list[bytes], at_most_behind: int) -> tuple[Server, Life]:
        """A server that is ready, waiting while one is being started.

        The one that computed the beginning of the prompt, known by the `keys` of its blocks, unless it has more than `at_most_behind`
        sequences more to do than the idlest. Raises TinsmithError, saying what happened, if none is ready and none is starting.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self._ready() or all(server.state == "down" for server in self.all))
        ready = self._ready()
        if not ready:
            raise TinsmithError(f"there is no vLLM server to sample with: {self.all[0].reason}")
        idlest = min(ready, key=lambda server: server.load)
        home = next((self.homes[key] for key in reversed(keys) if key in self.homes), idlest)
        chosen = home if home in ready and home.load - idlest.load <= at_most_behind else idlest
        if keys:
            self.homes[keys[-1]] = chosen
        assert chosen.life is not None, "a server that is ready has begun a life"
        return chosen, chosen.life

    def _ready(self) -> list[Server]:
        return [server for server in self.all if server.state == "ready"]
