"""vLLM servers: those that we start, supervise and restart, and those that were running before.

    starting -> ready -> (lost) -> down -> starting ...

Each time that a server gets ready there is a new `Instance`.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cachetools import LRUCache

from tinsmith.errors import TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.sampling.inside_vllm import TransferKind
from tinsmith.sampling.vllm.instance import Instance, SleepMode, Slots, running
from tinsmith.sampling.vllm.protocol import Connection

log = logging.getLogger(__name__)

_POLL_S = 0.25
_STARTS_WITHIN_S = 900.0
_LOOK_EVERY_S = 2.0
"""Seconds between two looks whether a server's engine still runs."""
_ANSWERS_WITHIN_S = 10.0
"""Seconds for which a server may say that its engine or a worker has ended, or take no connections.

One that we did not start must answer within this time. Silence of an engine is judged by `hung_s`.
"""
_LONGEST_DELAY_S = 30.0
_MOST_TOGETHER = 64
_LOG_TAIL = 2000
"""Bytes that are shown from the end of the log of a server that ended."""
_ERROR_LINE = re.compile(rb"(?:^|\s)((?:\w+\.)*[A-Z]\w*(?:Error|Exception): \S.*)$", re.MULTILINE)
"""The last line of a Python traceback, also behind the prefix of vLLM's logger."""
_MOST_ERRORS = 5


@dataclass(frozen=True)
class Launch:
    """A server to start."""

    command: list[str]
    """The command line, without the option for the socket."""
    environment: Mapping[str, str]
    sockets: Path
    """A directory that only the user can enter."""
    name: str
    log: Path
    transfer_kind: TransferKind
    ranks: int = 1
    """Workers over which the model is divided."""


class Server:
    """One vLLM server, through all its instances."""

    def __init__(
        self,
        source: Launch | str,
        slots: int,
        hung_s: float,
        changed: asyncio.Condition,
        try_out: Callable[[Instance], Coroutine[Any, Any, None]] | None = None,
        sleep_mode: SleepMode | None = None,
    ) -> None:
        """`source` says how to start it, or is the URL of one that runs already.

        It gets at most `slots` samples at a time.

        If it is needed and its engine is silent for `hung_s` seconds, it is replaced. `changed` is notified whenever
        `state` changes. `try_out` is awaited for each new instance before that is ready. It sleeps when `sleep_mode`
        says so, with others.
        """
        self.try_out = try_out
        self.sleep_mode = sleep_mode or SleepMode()
        self.source = source
        self.slots = slots
        self.hung_s = hung_s
        self.changed = changed
        self.state: Literal["starting", "ready", "down"] = "starting"
        self.reason = "it is starting"
        """Reason why it is not ready."""
        self.instance: Instance | None = None
        self.load = 0
        """Sequences that are being sampled there, or wait for it."""
        self.process: asyncio.subprocess.Process | None = None
        self._starts = itertools.count()
        self._suspected = asyncio.Event()
        self._fault = ""
        """Reason why the last instance was ended; empty if it ended by itself."""

    def suspect(self, instance: Instance, reason: str) -> None:
        """Send no more requests until the server is known to answer: one to `instance` was lost."""
        if self.instance is instance and self.state == "ready":
            self.state, self.reason = "starting", reason
            self._suspected.set()

    async def run(self) -> None:
        """Keep it running, or connected, for ever. A server that was ready before is started again at once."""
        delay_s = 0.0
        while True:
            await self._change("starting", "it is starting")
            try:
                was_ready = await self._run_instance()
                reason = self._why_down()
            except (OSError, ValueError) as error:  # ValueError: a malformed URL
                was_ready, reason = False, f"a vLLM server cannot be started, or reached: {error}"
            except Exception as error:  # its samples would wait for ever
                log.exception("unexpected error at a vLLM server")
                was_ready, reason = False, f"internal error at a vLLM server: {error!r}"
            delay_s = 0.0 if was_ready else min(max(1.0, 2 * delay_s), _LONGEST_DELAY_S)
            log.error("%s; next attempt in %.0f s", reason, delay_s)
            if not was_ready:
                await self._change("down", reason)
                await asyncio.sleep(delay_s)

    async def _run_instance(self) -> bool:
        """Start one instance and stay with it to its end; returns whether it was ever ready."""
        launch = self.source if isinstance(self.source, Launch) else None
        instance: Instance | None = None
        failing: asyncio.Task[str] | None = None
        self._fault = ""
        try:
            async with self.sleep_mode.kept_awake():  # it takes its memory while it starts
                began = time.monotonic()
                instance = Instance(
                    connection=Connection(await self._start()),
                    slots=Slots(self.slots),
                    samples_per_request=min(self.slots, _MOST_TOGETHER),
                    started_by_us=launch is not None,
                    transfer_kind=launch.transfer_kind if launch else "file",
                    sleep_mode=self.sleep_mode,
                    ranks=launch.ranks if launch else 1,
                    end=self._end,
                )
                self.sleep_mode.instances.add(instance)
                answers = await self._within(_STARTS_WITHIN_S if launch else _ANSWERS_WITHIN_S, instance.answers)
            if not answers:
                if self.process is not None and self.process.returncode is None:
                    self._fault = f"it did not answer within {_STARTS_WITHIN_S:g} s of its start"
                return False
            failing = asyncio.create_task(self._until_it_fails(instance))
            was_ready = await self._is_tried_out(instance, failing)
            if was_ready:
                self.instance = instance
                self._suspected.clear()
                await self._change("ready", "")
                log.info("the vLLM server at %s is ready, %.1f s", instance.connection.url, time.monotonic() - began)
                await self._watch(instance, failing)
            if self.process is None or self.process.returncode is None:
                self._fault = (
                    failing.result() if failing.done() else "a worker of it has ended, or it takes no requests any more"
                )
            return was_ready
        finally:
            if failing is not None:
                failing.cancel()
            if instance is not None:
                await instance.connection.close()
            await self._end()
            if instance is not None:
                self.sleep_mode.instances.discard(instance)

    async def _change(self, state: Literal["starting", "ready", "down"], reason: str) -> None:
        async with self.changed:
            self.state, self.reason = state, reason
            self.changed.notify_all()

    async def _start(self) -> str:
        """Start it, if that is ours to do; returns its URL."""
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

    async def _is_tried_out(self, instance: Instance, failing: asyncio.Task[str]) -> bool:
        """Try an instance out; returns whether it is still there.

        Failures come again with the first sample that needs it.

        An unexpected error is most likely the trainer's, such as a lack of memory: the server stays.
        """
        if self.try_out is None:
            return True
        failures: list[str] = []
        async with running(self.try_out(instance)) as trying:
            await asyncio.wait((trying, failing), return_when=asyncio.FIRST_COMPLETED)
            if not trying.done():  # it may be waiting until the server is awake: it is not waited for
                return False
            with failing_into(lambda error: failures.append(str(error))):
                trying.result()
        if failures:
            log.warning("the vLLM server at %s could not be tried out: %s", instance.connection.url, failures[0])
            return await self._answers_again(instance, failing)
        return not failing.done()

    async def _watch(self, instance: Instance, failing: asyncio.Task[str]) -> None:
        """Return when the server has gone, or fails."""
        while True:
            async with running(self._suspected.wait()) as suspected, running(self._process_ends()) as ended:
                await asyncio.wait((failing, suspected, ended), return_when=asyncio.FIRST_COMPLETED)
            if failing.done() or not await self._answers_again(instance, failing):
                return
            self._suspected.clear()
            await self._change("ready", "")

    async def _process_ends(self) -> None:
        """Return when our process has ended; never for a server that we did not start."""
        await (self.process.wait() if self.process is not None else asyncio.Event().wait())

    async def _answers_again(self, instance: Instance, failing: asyncio.Task[str]) -> bool:
        """Return whether a server on which a request failed can be used.

        Its engine may be busy: only an error is a no.
        """
        refused_at: float | None = None
        while not failing.done() and (self.process is None or self.process.returncode is None):
            asked_at = time.monotonic()
            async with running(instance.answers()) as asked:
                await asyncio.wait((asked, failing), return_when=asyncio.FIRST_COMPLETED)
                if asked.done() and asked.result():
                    return True
            if refused_at is None or time.monotonic() - asked_at > _ANSWERS_WITHIN_S:  # meanwhile it was busy
                refused_at = time.monotonic()
            if time.monotonic() - refused_at > _ANSWERS_WITHIN_S:
                return False
            await asyncio.sleep(_POLL_S)
        return False

    async def _until_it_fails(self, instance: Instance) -> str:
        """Return when the server has to be replaced, and why: its engine has ended, or is silent too long when needed.

        It is needed as long as it is not ready, has samples to compute, or keeps the trainer waiting. An idle server
        that we did not start is given up at once when it is lost: when it comes back it has lost all weights.
        """
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            is_tried_out = self.instance is not instance
            is_needed = self.state != "ready" or self.load > 0 or self.sleep_mode.is_delayed
            if is_needed:
                longest_s = max(self.hung_s, _STARTS_WITHIN_S) if is_tried_out else self.hung_s
                seen = await instance.look(longest_s)
                if seen == "silent":
                    return f"it hangs: it answered nothing for {longest_s:g} s"
                is_lost = seen == "lost"
            else:
                is_lost = not await self._is_alive_soon(instance)
            may_return = is_needed or instance.started_by_us
            if is_lost and not (may_return and await self._within(_ANSWERS_WITHIN_S, instance.is_alive)):
                return "its engine has ended, or it takes no requests any more"

    async def _is_alive_soon(self, instance: Instance) -> bool:
        """Return whether an idle server is alive.

        One of ours that says nothing may be busy, and is left alone until it is needed.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                return await instance.is_alive()
        return instance.started_by_us

    async def _within(self, limit_s: float, asked: Callable[[], Awaitable[bool]]) -> bool:
        """Ask the server again and again, as long as our process runs; returns whether a yes came in that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.process is None or self.process.returncode is None:
                    if await asked():
                        return True
                    await asyncio.sleep(_POLL_S)
        return False

    async def _end(self) -> None:
        """Kill our process and all that it started: otherwise vLLM's own processes outlive it."""
        process = self.process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the launcher has made a group of its own
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # it may have had no time for that
        await process.wait()

    def _why_down(self) -> str:
        if isinstance(self.source, str) or self.process is None:
            return (
                f"the vLLM server at {self.source} is left: {self._fault}"
                if self._fault
                else f"no vLLM server answers at {self.source}"
            )
        how = f"was killed, because {self._fault}" if self._fault else f"ended (exit code {self.process.returncode})"
        written = self.source.log.read_bytes() if self.source.log.exists() else b""
        return f"a vLLM server {how}; {self.source.log} says: {log_excerpt(written)}"


def _seed(command: list[str]) -> list[str]:
    """Return a seed for each start: vLLM's default is 0, so unseeded samples would repeat those of other servers."""
    given = any(option.partition("=")[0] == "--seed" for option in command)
    return [] if given else ["--seed", str(secrets.randbits(31))]


def log_excerpt(content: bytes) -> str:
    """Return the lines of a log that tell why a server ended: its first errors, most often the reason, and its end."""
    tail = content[-_LOG_TAIL:]
    errors = list(dict.fromkeys(_ERROR_LINE.findall(content[:-_LOG_TAIL])))[:_MOST_ERRORS]
    return b"\n".join([*errors, *([b"..."] if errors else []), tail.strip()]).decode(errors="replace")


class Servers:
    """All servers of one base model, and which of them a request goes to.

    Made in the event loop that keeps them running.
    """

    def __init__(self, servers: list[Server], changed: asyncio.Condition) -> None:
        self.all = servers
        self.tasks = [asyncio.create_task(server.run()) for server in servers]
        self.changed = changed
        self.affinity: LRUCache[bytes, Server] = LRUCache(2**16)
        """The server that computed a prompt, by the key of the prompt's last full block."""

    @property
    def instances(self) -> list[Instance]:
        return [server.instance for server in self.all if server.instance is not None]

    async def pick(self, keys: list[bytes], max_lead: int) -> tuple[Server, Instance]:
        """Return a server that is ready, and its instance. Waits while servers are being started.

        It is the one that computed the beginning of the prompt, known by the `keys` of its blocks, unless that has more
        than `max_lead` sequences more to compute than the idlest. Raises TinsmithError if none is ready and none is
        starting.
        """
        async with self.changed:
            await self.changed.wait_for(lambda: self._ready() or all(server.state == "down" for server in self.all))
        ready = self._ready()
        if not ready:
            raise TinsmithError(f"there is no vLLM server to sample with: {self.all[0].reason}")
        idlest = min(ready, key=lambda server: server.load)
        known = next((self.affinity[key] for key in reversed(keys) if key in self.affinity), idlest)
        chosen = known if known in ready and known.load - idlest.load <= max_lead else idlest
        if keys:
            self.affinity[keys[-1]] = chosen
        assert chosen.instance is not None, "a server that is ready has an instance"
        return chosen, chosen.instance

    def _ready(self) -> list[Server]:
        return [server for server in self.all if server.state == "ready"]
