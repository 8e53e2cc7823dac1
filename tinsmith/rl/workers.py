"""Where environments run: in the event loop, in threads, or in processes, with a time-out for every call.

An environment may block, raise or hang; that is one trajectory's misfortune. Threads suit environments that wait (for a service, a
simulator); processes suit those that compute or that may hang for good: a process is one episode's at a time and is killed on a time-out, a
thread is only left behind until its call returns.
"""

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from tinsmith.errors import ConfigError, TinsmithError
from tinsmith.rl import registry
from tinsmith.rl.calls import EnvError, call, env_error, guarded
from tinsmith.rl.config import WorkerKind
from tinsmith.rl.env import Env

OPEN_S = 120.0
"""How long a thread or a process may take to import an environment's module and make the environment."""


class EnvTimeoutError(TinsmithError):
    """A call of an environment took longer than its time-out."""


class Session(Protocol):
    """One environment for one episode, wherever it runs."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """What the environment's `method` returns, checked (`calls.py`). Raises EnvError, EnvTimeoutError."""
        ...

    async def end(self) -> None:
        """Close the environment and give its place back. Raises as `call` does."""
        ...


class Workers(Protocol):
    """Makes environments, each at a place of its own."""

    async def open(self, name: str, options: Mapping[str, Any]) -> Session:
        """A new environment of the registry. Raises EnvError, EnvTimeoutError; ConfigError for a name or options that cannot be."""
        ...

    def shutdown(self) -> None:
        """Let threads and processes go."""
        ...


def make_workers(kind: WorkerKind, count: int, timeout_s: float) -> Workers:
    """`count` threads or processes (an inline environment has no time-out)."""
    match kind:
        case "inline":
            return InlineWorkers()
        case "thread":
            return ThreadWorkers(count, timeout_s)
        case "process":
            return ProcessWorkers(count, timeout_s)


@dataclass
class InlineSession:
    """An environment that answers at once."""

    env: Env

    async def call(self, method: str, *arguments: Any) -> Any:
        """The method's value. Raises EnvError."""
        return call(self.env, method, *arguments)

    async def end(self) -> None:
        """Close it."""
        await self.call("close")


class InlineWorkers:
    """No workers: environments run in the event loop. For those whose steps take less than a millisecond."""

    async def open(self, name: str, options: Mapping[str, Any]) -> InlineSession:
        """A new environment."""
        return InlineSession(_made(name, options))

    def shutdown(self) -> None:
        """Nothing to let go."""


@dataclass
class ThreadSession:
    """An environment whose calls run in any of the threads."""

    workers: "ThreadWorkers"
    env: Env

    async def call(self, method: str, *arguments: Any) -> Any:
        """The method's value. Raises EnvError, EnvTimeoutError."""
        return await self.workers.run(self.workers.timeout_s, call, self.env, method, *arguments)

    async def end(self) -> None:
        """Close it."""
        await self.call("close")


class ThreadWorkers:
    """`count` calls at a time, each at most `timeout_s` seconds."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._slots = asyncio.Semaphore(count)

    async def open(self, name: str, options: Mapping[str, Any]) -> ThreadSession:
        """A new environment, made in one of the threads."""
        return ThreadSession(self, await self.run(OPEN_S, _made, name, options))

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """The value of a function that raises TinsmithError only. Raises as that does, and EnvTimeoutError."""
        async with self._slots:  # so that the time-out begins when the call does
            return await _within(timeout_s, _in_a_thread(function, *arguments))

    def shutdown(self) -> None:
        """Nothing to let go: a thread ends with its call, and the interpreter waits for none."""


class _Seat:
    """A process that holds one environment at a time. Started on first use, and anew after it was killed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._pool is not None

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value in the process. Raises EnvError, EnvTimeoutError."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pid = await asyncio.wrap_future(self._pool.submit(os.getpid))
        try:
            return await _within(timeout_s, self._pool.submit(function, *arguments))
        except EnvTimeoutError:
            os.kill(self._pid, signal.SIGKILL)
            self.shutdown()
            raise
        except BrokenProcessPool as error:
            self.shutdown()
            raise EnvError(f"the environment's process ended: {error}") from error

    def shutdown(self) -> None:
        """Let the process end."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


@dataclass
class ProcessSession:
    """An environment in a process that is its own until it ends."""

    workers: "ProcessWorkers"
    seat: _Seat

    async def call(self, method: str, *arguments: Any) -> Any:
        """The method's value, which must be picklable. Raises EnvError, EnvTimeoutError."""
        return await self.seat.run(self.workers.timeout_s, _call_in_process, method, arguments)

    async def end(self) -> None:
        """Close the environment; the process waits for the next one."""
        try:
            if self.seat.alive:  # what a time-out killed has nothing left to close
                await self.call("close")
        finally:
            self.workers.free.put_nowait(self.seat)


class ProcessWorkers:
    """`count` processes: as many episodes at a time."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.free: asyncio.Queue[_Seat] = asyncio.Queue()
        self._seats = [_Seat() for _ in range(count)]
        for seat in self._seats:
            self.free.put_nowait(seat)

    async def open(self, name: str, options: Mapping[str, Any]) -> ProcessSession:
        """A new environment in a process that is free, or as soon as one is."""
        factory = registry.find(name)  # a name that only this process knows is known there, too
        seat = await self.free.get()
        try:
            await seat.run(OPEN_S, _open_in_process, factory, dict(options))
        except TinsmithError:
            self.free.put_nowait(seat)
            raise
        return ProcessSession(self, seat)

    def shutdown(self) -> None:
        """Let the processes end."""
        for seat in self._seats:
            seat.shutdown()


_here: dict[str, Env] = {}
"""In a worker process: its environment."""


def _open_in_process(factory: Callable[..., Env], options: dict[str, Any]) -> None:
    _here["env"] = guarded(partial(factory, **options))


def _call_in_process(method: str, arguments: tuple[Any, ...]) -> Any:
    return call(_here["env"], method, *arguments)


def _made(name: str, options: Mapping[str, Any]) -> Env:
    """A new environment. Raises ConfigError as the registry does, and EnvError for what its constructor raises."""
    try:
        return registry.make(name, **options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # as in `guarded`
        raise env_error(error) from error


def _in_a_thread(function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
    """The outcome of a call that raises TinsmithError only, in a thread of its own: the interpreter would wait for an executor's."""
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function(*arguments))
        except TinsmithError as error:
            future.set_exception(error)
        finally:
            if not future.done():  # whatever can end a thread beside exceptions
                future.set_exception(EnvError("the environment ended its thread"))

    threading.Thread(target=work, daemon=True).start()
    return future


async def _within(timeout_s: float, call: "Future[Any]") -> Any:
    """The call's outcome. Raises EnvTimeoutError, EnvError for a value that cannot be brought here, and what the call itself raises."""
    future = asyncio.wrap_future(call)
    done, _ = await asyncio.wait({future}, timeout=timeout_s)
    if not done:
        future.cancel()
        raise EnvTimeoutError(f"the environment took longer than its time-out of {timeout_s:g} s")
    error = future.exception()
    if isinstance(error, BrokenProcessPool | TinsmithError):
        raise error
    if error is not None:
        raise env_error(error) from error
    return future.result()
