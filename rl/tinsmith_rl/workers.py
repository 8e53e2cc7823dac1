"""Runs environments in the event loop, in threads, or in processes.

All calls have a time-out, but those that block the event loop.

An environment may block, raise or hang, and only its own episode may suffer. Threads suit environments that wait for
something, such as a service or a simulator. Processes suit environments that compute, or that may hang for good: a
process serves one episode at a time and is killed on a time-out, while a thread is left behind until its call returns.
Asynchronous methods are awaited in one event loop: that of the program, or of the environment's process.
"""

import asyncio
import inspect
import multiprocessing
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tinsmith_rl.calls import EnvError, call, env_error, environment_code
from tinsmith_rl.config import WorkerKind
from tinsmith_rl.env import Env, find, make
from tinsmith_rl.errors import ConfigError, RlError

OPEN_S = 120.0
"""Seconds in which a thread or process must have imported the environment's module and made the environment."""


class EnvTimeoutError(RlError):
    """A call into an environment took longer than its time-out."""


class EnvSession(Protocol):
    """One environment during one episode, wherever it runs."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the environment and return its checked value. Raises EnvError, EnvTimeoutError."""
        ...

    async def end(self) -> None:
        """Close the environment and free its place. Raises as `call` does."""
        ...


class Workers(Protocol):
    """Opens a session with a new environment for each episode."""

    async def open(self, name: str, options: Mapping[str, Any]) -> EnvSession:
        """Make the environment of this name.

        Raises EnvError, EnvTimeoutError; ConfigError for an unknown name or wrong options.
        """
        ...

    def shutdown(self) -> None:
        """Stop threads and processes."""
        ...


def make_workers(kind: WorkerKind, count: int, timeout_s: float) -> Workers:
    """The workers of a kind; inline ones have no `count`, and a time-out for asynchronous calls only."""
    match kind:
        case "inline":
            return InlineWorkers(timeout_s)
        case "thread":
            return ThreadWorkers(count, timeout_s)
        case "process":
            return ProcessWorkers(count, timeout_s)


@dataclass
class LocalSession:
    """An environment in this process."""

    workers: "InlineWorkers"
    env: Env

    async def call(self, method: str, *arguments: Any) -> Any:
        timeout_s = self.workers.timeout_s
        value = await self.workers.run(timeout_s, call, self.env, method, *arguments)
        return await _within(timeout_s, value) if inspect.isawaitable(value) else value

    async def end(self) -> None:
        await self.call("close")


class InlineWorkers:
    """Environments run in the event loop.

    For those that are asynchronous, or whose steps take less than a millisecond.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    async def open(self, name: str, options: Mapping[str, Any]) -> LocalSession:
        return LocalSession(self, await self.run(OPEN_S, _made, name, options))

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that raises nothing but RlError. Raises that, and EnvTimeoutError if it runs elsewhere."""
        return function(*arguments)

    def shutdown(self) -> None:
        return


class ThreadWorkers(InlineWorkers):
    """Environments run in threads, each call in a new one: at most `count` at a time, each at most `timeout_s` s.

    `shutdown` leaves the threads alone: each ends with its call, and the interpreter does not wait for them.
    """

    def __init__(self, count: int, timeout_s: float) -> None:
        super().__init__(timeout_s)
        self._slots = asyncio.Semaphore(count)

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        async with self._slots:  # the time-out begins with the call, not with the wait for a slot
            return await _within(timeout_s, _in_a_thread(function, *arguments))


class _EnvProcess:
    """A process that holds one environment at a time. It is started on first use, and again after it was killed."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None
        self._pid = 0

    @property
    def alive(self) -> bool:
        return self._pool is not None

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process. Raises EnvError, EnvTimeoutError."""
        try:
            if self._pool is None:
                with _safe_path() as before:
                    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _set_safe_path, (before,))
                    pid = pool.submit(os.getpid)
                self._pid = await asyncio.wrap_future(pid)
                self._pool = pool  # only now: who is cancelled before leaves no process without its id
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
    """An environment in a process that serves no other episode until this one ends."""

    workers: "ProcessWorkers"
    process: _EnvProcess

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method, whose arguments and value must be picklable. Raises EnvError, EnvTimeoutError."""
        return await self.process.run(self.workers.timeout_s, _call_in_process, method, arguments)

    async def end(self) -> None:
        try:
            if self.process.alive:  # after a time-out there is nothing left to close
                await self.call("close")
        finally:
            self.workers.free.put_nowait(self.process)


class ProcessWorkers:
    """`count` processes, which serve as many episodes at a time."""

    def __init__(self, count: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.free: asyncio.Queue[_EnvProcess] = asyncio.Queue()
        self._processes = [_EnvProcess() for _ in range(count)]
        for process in self._processes:
            self.free.put_nowait(process)

    async def open(self, name: str, options: Mapping[str, Any]) -> ProcessSession:
        """Make an environment as soon as a process is free."""
        factory = find(name)  # the process gets the factory itself, because names are registered in this process only
        process = await self.free.get()
        # Unless the environment is made; also for an episode that is cancelled meanwhile
        with ExitStack() as given_back:
            given_back.callback(self.free.put_nowait, process)
            await process.run(OPEN_S, _open_in_process, factory, dict(options))
            given_back.pop_all()
        return ProcessSession(self, process)

    def shutdown(self) -> None:
        for process in self._processes:
            process.shutdown()


_SAFE_PATH = "PYTHONSAFEPATH"


@contextmanager
def _safe_path() -> Iterator[str | None]:
    """Let the Python processes that are started in the body import nothing of the working directory while they start.

    Then they take over this process's path of imports, in which it comes last. Yields what the variable is outside of
    the body: programs that an environment starts are to see that.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield before
    finally:
        _set_safe_path(before)


def _set_safe_path(value: str | None) -> None:
    if value is None:
        del os.environ[_SAFE_PATH]
    else:
        os.environ[_SAFE_PATH] = value


_of_this_process: dict[str, Any] = {}
"""The state of a process of `ProcessWorkers`: its environment as "env", the runner of async methods as "loop"."""


def _open_in_process(factory: Callable[..., Env], options: dict[str, Any]) -> None:
    with environment_code():
        _of_this_process["env"] = factory(**options)


def _call_in_process(method: str, arguments: tuple[Any, ...]) -> Any:
    value = call(_of_this_process["env"], method, *arguments)
    if not inspect.isawaitable(value):
        return value
    return _of_this_process.setdefault("loop", asyncio.Runner()).run(value)


def _made(name: str, options: Mapping[str, Any]) -> Env:
    """A new environment.

    Raises ConfigError for an unknown name or wrong options, and EnvError for what its constructor raises.
    """
    with environment_code(ConfigError):
        return make(name, **options)


def _in_a_thread(function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
    """Call a function that raises nothing but RlError in a new thread.

    The thread is a daemon: the interpreter does not wait for it at its end, as it would for the threads of an executor.
    """
    future: Future[Any] = Future()

    def work() -> None:
        future.set_running_or_notify_cancel()
        try:
            future.set_result(function(*arguments))
        except RlError as error:
            future.set_exception(error)
        finally:
            if not future.done():  # neither returned nor raised a RlError: a BaseException ended the thread
                future.set_exception(EnvError("the environment ended its thread"))

    threading.Thread(target=work, daemon=True).start()
    return future


async def _within(timeout_s: float, call: "Future[Any] | Awaitable[Any]") -> Any:
    """The result of a call.

    Raises EnvTimeoutError, EnvError for a value that cannot be pickled, and what the call itself raises.
    """
    future = asyncio.wrap_future(call) if isinstance(call, Future) else asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
    finally:
        future.cancel()  # without effect on a call that has ended
    if not done:
        raise EnvTimeoutError(f"the environment took longer than its time-out of {timeout_s:g} s")
    if future.cancelled():
        raise EnvError("the environment cancelled its own task")
    error = future.exception()
    if isinstance(error, BrokenProcessPool | RlError):
        raise error
    if error is not None:
        raise env_error(error) from error
    return future.result()
