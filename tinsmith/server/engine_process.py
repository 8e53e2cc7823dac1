"""The engine as a child process: started with a fresh link, watched, restarted if it dies, ended with the server."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

import zmq

from tinsmith.config import Config
from tinsmith.errors import ConfigError, EngineUnavailableError, StoreUnavailableError, reported
from tinsmith.observing.metrics import ENGINE_RESTARTS
from tinsmith.protocol.child_process import (
    LAST_WORDS_S,
    WATCH_S,
    EngineStart,
    exit_text,
    is_hopeless,
    is_stopped,
    next_delay_s,
)
from tinsmith.protocol.link import ServerLink
from tinsmith.protocol.messages import Message
from tinsmith.protocol.serving import Alive, Bye, Ready, Recovering, Saving, Shutdown, Starting
from tinsmith.server.engine_program import ENGINE, EngineProgram
from tinsmith.server.waiters import set_within

log = logging.getLogger(__name__)

# Tells how far an engine's start is. Each step is expected to take what it took the last time.

FILE = "start_times.json"
"""File in the data directory: seconds of each step when it was last taken."""


class StartProgress:
    """One start after the other."""

    def __init__(self, data_dir: Path) -> None:
        self._file = data_dir / FILE
        self._last = _read(self._file)
        self._taken: dict[str, float] = {}
        """Seconds of the finished steps of this start."""
        self._current = Starting("", [])
        self._since = time.monotonic()

    def begin(self) -> None:
        self._taken, self._current, self._since = {}, Starting("", []), time.monotonic()

    def take(self, message: Starting) -> None:
        self._close_step()
        self._current = message

    def finish(self) -> None:
        """End the start, and write down what it took."""
        self._close_step()
        self._current = Starting("", [])
        self._last |= self._taken
        new = self._file.with_suffix(".new")
        with reported(OSError, partial(log.warning, "the next start cannot say how long it takes: %s")):
            new.write_text(json.dumps(self._last, indent=1))
            new.replace(self._file)

    def _close_step(self) -> None:
        now = time.monotonic()
        if self._current.step:
            self._taken[self._current.step] = now - self._since
        self._since = now

    @property
    def left_s(self) -> float | None:
        """Seconds to the end of the start; None if they cannot be guessed."""
        steps = [self._current.step, *self._current.to_come]
        if not all(step in self._last for step in steps):
            return None
        current, *later = (self._last[step] for step in steps)
        return max(0.0, current - (time.monotonic() - self._since)) + sum(later)

    @property
    def text(self) -> str:
        """A sentence for people."""
        if not self._current.step:
            return "the engine is starting"
        done, count, left_s = len(self._taken), len(self._taken) + 1 + len(self._current.to_come), self.left_s
        left = "" if left_s is None else f"; about {left_s:.0f} s are left"
        return f"the engine is starting: it {self._current.step} (step {done + 1} of {count}){left}"


def _read(file: Path) -> dict[str, float]:
    """The seconds in the file; none if it is missing or damaged: they are only a guess."""
    known: object = None
    with (
        reported((OSError, ValueError), partial(log.warning, "%s is passed over: %s", file)),
        suppress(FileNotFoundError),
    ):
        known = json.loads(file.read_text())
    steps = known.items() if isinstance(known, dict) else ()
    return {str(step): float(seconds) for step, seconds in steps if isinstance(seconds, int | float)}


# The process whose start that is.

_DATABASE_RETRY_S = 1.0
"""Time between two attempts to write down that an engine has ended."""

STAND_BY_S = 5.0
"""Seconds for which an engine has been ready when the next one's program is started: its imports take a core."""


class EngineProcess:
    """Keeps one engine running."""

    def __init__(
        self,
        config: Config,
        on_message: Callable[[Message], None],
        on_ready: Callable[[], Awaitable[None]],
        on_absent: Callable[[str], Awaitable[int]],
        program: Sequence[str] = ENGINE,
    ) -> None:
        """Nothing runs yet.

        `on_message` gets every message. `on_ready` is awaited when an engine can take work, `on_absent` before each
        start and after each death, with what happened, and returns the number of the next engine (`store/lease.py`).
        """
        self._config = config
        self._on_message = on_message
        self._on_ready = on_ready
        self._on_absent = on_absent
        self._program = program
        self._link: ServerLink | None = None
        self._process: EngineProgram | None = None
        self.spare: EngineProgram | None = None
        """The next engine, if it stands by."""
        self.begun = asyncio.Event()
        """Set when the first engine has been told how to start."""
        self._number = 0
        """The number of the engine that runs, or is started next."""
        self._stop = asyncio.Event()
        self._patience: asyncio.Timeout | None = None
        """Time that the engine may take to end, once it was told to."""
        self._bye = asyncio.Event()
        self._fault = ""
        """The reason for which the engine that runs, or has just ended, was to end; empty if nobody knows."""
        self.ready = asyncio.Event()
        self._was_ready = False
        """Whether the engine that runs, or has just ended, was ever ready."""
        self._beaten = False
        """Whether a heartbeat came since the watchdog last looked."""
        self.state: Literal["starting", "ready", "recovering", "silent", "down"] = "starting"
        """One that recovers has lost its worker and starts another.

        A silent one was ready, and has shown no sign of life for `engine_silent_s`.
        """
        self._progress = StartProgress(Path(config.data_dir))
        self.reason = self._progress.text
        """The reason why the engine is not ready, if it is not."""
        self.busy_s = 0.0
        """Seconds that its loop had been in its current turn at the last heartbeat; 0 while it waits for work."""

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def takes_messages(self) -> bool:
        """Whether what is sent reaches an engine that was ready, though it may take no samples now."""
        return self.state in ("ready", "recovering", "silent")

    async def run(self) -> None:
        """Start the engine and restart it until `stop`. Raises ConfigError if none of the first is ever ready."""
        try:
            await self._keep_running()
        finally:
            if self.spare is not None:
                self.spare.close()

    async def _keep_running(self) -> None:
        happened = "the server was restarted"
        delay_s = 0.0
        ever_ready = False
        starts = 0
        while True:
            while not await self._gave_up(happened):
                if await set_within(self._stop, _DATABASE_RETRY_S):
                    return
            if await set_within(self._stop, delay_s):
                return
            starts += 1
            exit_code, was_ready = await self._run_once()
            if self._stop.is_set():
                return
            ever_ready |= was_ready
            happened = f"the engine process ended unexpectedly ({self._fault or exit_text(exit_code)})"
            if not ever_ready and is_hopeless(exit_code, starts):
                raise ConfigError(f"{happened} before it could take work; its output above says why")
            ENGINE_RESTARTS.inc()
            delay_s = next_delay_s(delay_s, was_ready)
            self.reason = f"{happened}; it is restarted in {delay_s:.0f} s"
            log.error(self.reason)

    async def _gave_up(self, happened: str) -> bool:
        """Give up what the absent engine had.

        False if the database, which is to know of it, is locked, full or broken: try again.
        """
        try:
            self._number = await self._on_absent(happened)
        except StoreUnavailableError as error:
            self.reason = f"{happened}; the engine is not started: {error}"
            log.warning(self.reason)
            return False
        return True

    async def _run_once(self) -> tuple[int, bool]:
        """Run one engine process: its exit code, and whether it was ever ready."""
        link, process = ServerLink(), self._next_program()
        self._link, self._process = link, process
        self._bye, self._fault, self._was_ready = asyncio.Event(), "", False
        self._progress.begin()
        self.state, self.reason = "starting", self._progress.text
        log.info("the engine starts: it imports its libraries and loads %s ...", ", ".join(self._config.base_models))
        watchers = [
            asyncio.create_task(watch) for watch in (self._read(link), self._listen(link), self._watch(process))
        ]
        try:
            if self._stop.is_set():
                process.kill()
            process.begin(EngineStart(link.address, self._number, self._config).to_bytes())
            self.begun.set()
            return await self._ended(process, watchers), self._was_ready
        finally:
            self._link = self._process = None
            for watcher in watchers:
                watcher.cancel()
            await asyncio.wait(watchers)
            link.close()

    def _next_program(self) -> EngineProgram:
        """Return the program that stands by, unless it has ended or is stopped, or another."""
        spare, self.spare = self.spare, None
        if spare is not None:
            if spare.exit_code is None and not is_stopped(spare.pid):
                return spare
            spare.close()
        return EngineProgram(self._program)

    def _stand_by(self) -> None:
        """Start the next engine's program, which imports its libraries and waits."""
        if self._was_ready and self.spare is None and not self._stop.is_set():
            with reported(OSError, partial(log.warning, "the next engine cannot stand by: %s")):
                self.spare = EngineProgram(self._program)

    async def _ended(self, process: EngineProgram, watchers: list[asyncio.Task[None]]) -> int:
        """Wait for the end of the process; returns its exit code.

        If one that watches it fails, nobody would see: the process is killed.
        """
        exited = asyncio.create_task(process.ended())
        await asyncio.wait([exited, *watchers], return_when=asyncio.FIRST_COMPLETED)
        for failed in (watcher for watcher in watchers if watcher.done()):
            log.error(
                "the engine process is killed: the server cannot listen to it any more", exc_info=failed.exception()
            )
            self._fault = f"the server could not listen to it any more: {failed.exception()!r}"
            process.kill()
        exit_code = await exited
        self.state, self.reason, self.busy_s = "down", f"the engine process has ended ({exit_text(exit_code)})", 0.0
        await set_within(self._bye, LAST_WORDS_S)
        return exit_code

    async def _read(self, link: ServerLink) -> None:
        """Handle what the engine says. A message that cannot be handled is logged, and those behind it are read."""
        while True:
            try:
                await self._handle(await link.receive())
            except zmq.ZMQError:
                raise
            except Exception:
                log.exception("a message of the engine could not be handled")

    async def _handle(self, message: Message) -> None:
        if isinstance(message, Saving) and self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time() + self._config.server.shutdown_s)
        if isinstance(message, Bye):
            self._fault = message.reason
            self._bye.set()
        self._on_message(message)
        if isinstance(message, Starting):
            self._progress.take(message)
            if self.state == "starting":
                self.reason = self._progress.text
                log.info(self.reason)
        if isinstance(message, Recovering) and self.takes_messages:
            self._progress.begin()
            self.state, self.reason = "recovering", f"{message.reason}; the engine starts another"
        if isinstance(message, Ready) and self.state in ("starting", "recovering"):
            self.state, self.reason, self._was_ready = "ready", "", True
            self._progress.finish()
            log.info("the engine is ready: %s", ", ".join(model["name"] for model in message.models))
            await self._on_ready()
            self.ready.set()
            if self._config.server.stand_by:
                asyncio.get_running_loop().call_later(STAND_BY_S, self._stand_by)

    async def _listen(self, link: ServerLink) -> None:
        while True:
            beat = await link.receive_heartbeat()
            if not isinstance(beat, Alive):
                self._take_report(beat)
                continue
            self.busy_s = beat.busy_s
            self._beaten = True
            if self.state == "starting":
                self.reason = self._progress.text
            elif self.state == "silent":
                self.state, self.reason = "ready", ""
                log.info("the engine shows signs of life again")

    def _take_report(self, report: Message) -> None:
        """Take in what the engine counts. What is wrong with it harms nothing else."""
        with reported(Exception, partial(log.error, "a report of the engine could not be read: %r")):
            self._on_message(report)

    async def _watch(self, process: EngineProgram) -> None:
        """Notice that the process is silent, and in the end kill it.

        Silence is counted in rounds, not by the clock: a server that could not run itself, because it was stopped or
        its machine slept, has heard nothing either.
        """
        silent_s = 0.0
        while True:
            self._beaten = False
            await asyncio.sleep(WATCH_S)
            silent_s = 0.0 if self._beaten else silent_s + WATCH_S
            if silent_s >= self._config.server.engine_silent_s:
                if self.state == "ready":
                    log.error("the engine has shown no sign of life for %.0f s; it is not given new work", silent_s)
                    self.state = "silent"
                self.reason = f"the engine has shown no sign of life for {silent_s:.0f} s"
            if silent_s >= self._config.server.engine_hung_s:
                self._fault = f"it had shown no sign of life for {silent_s:.0f} s (engine_hung_s) and was killed"
                process.kill()
                silent_s = 0.0

    async def send(self, message: Message) -> None:
        """Send to a ready engine. Raises EngineUnavailableError if there is none."""
        if not self.is_ready or self._link is None:
            raise EngineUnavailableError(f"{self.reason}; send the request again")
        await self._link.send(message)

    async def notify(self, message: Message) -> None:
        """Send to the engine if one was ready. One that is not finds everything in the store when it is."""
        if self.takes_messages and self._link is not None:
            await self._link.send(message)

    async def stop(self) -> None:
        """Let the engine finish the pass that is running, save its models and exit.

        It is ended once it has needed more than `shutdown_s` for the pass, or for one of the models.
        """
        self._stop.set()
        process, link = self._process, self._link
        if process is None or link is None:
            return
        if not self.takes_messages:  # it loads base models, or has ended
            self.kill()
            await process.ended()
            return
        limit_s = self._config.server.shutdown_s
        with contextlib.suppress(EngineUnavailableError, TimeoutError):
            await link.send(Shutdown())
            async with asyncio.timeout(limit_s) as self._patience:
                await process.ended()
                return
        log.error(
            (
                "the engine has not ended or begun to save another model within shutdown_s=%g and is killed: "
                "the next one brings its models back"
            ),
            limit_s,
        )
        self.kill()
        await process.ended()

    def kill(self) -> None:
        """End the engine at once. The next one brings its models back."""
        if self._process is not None:
            self._process.kill()
