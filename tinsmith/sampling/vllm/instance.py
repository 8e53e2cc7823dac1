"""One instance of a vLLM server, from a start of its process to the end: what it holds, and who may use it.

A restarted server is a new instance, which has none of the weights and images of the former. Instances that share a GPU
with the trainer (--vllm-turn-s) sleep while it computes. Everything here belongs to one event loop.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from cachetools import LRUCache

from tinsmith.errors import TinsmithError
from tinsmith.sampling.inside_vllm import TransferKind
from tinsmith.sampling.vllm.protocol import Connection, RefusedError, ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.weights import Transfer

log = logging.getLogger(__name__)

T = TypeVar("T")

_SWITCHES_WITHIN_S = 120.0
"""Seconds within which a server must fall asleep or wake. Weights of 100 GB are copied in seconds."""


class SleepMode:
    """Sleep mode of the servers of a base model (vLLM's level 1), which begin awake.

    A server that sleeps has its weights and adapters in the host's memory, and no cache. Samples under way go on when
    it has woken, which computes their keys and values again. Whatever would write to its memory waits.
    """

    def __init__(self) -> None:
        self.instances: set[Instance] = set()
        """Servers that run, and hold memory of the GPU while they are awake."""
        self._awake, self._idle = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._idle.set()
        self._kept = 0

    @property
    def is_delayed(self) -> bool:
        """True while the servers are to fall asleep, and something keeps one of them awake."""
        return not self._awake.is_set() and self._kept > 0

    async def until_awake(self) -> None:
        """Return when the servers are awake. They may fall asleep again at any time."""
        while not self._awake.is_set():
            await self._awake.wait()

    @asynccontextmanager
    async def kept_awake(self) -> AsyncIterator[None]:
        """Run the body while the servers are awake and stay so.

        It must not come here again: they may be falling asleep.
        """
        await self.until_awake()
        self._kept += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._kept -= 1
            if not self._kept:
                self._idle.set()

    async def fall_asleep(self) -> None:
        """Put all servers to sleep, once nothing keeps them awake."""
        self._awake.clear()
        await self._idle.wait()
        posts = [(instance, instance.connection.post("/sleep", level="1", mode="keep")) for instance in self.instances]
        await asyncio.gather(*(_obeyed(instance, post) for instance, post in posts))

    async def wake_up(self) -> None:
        """Wake all servers. What they compute is compared again before it is returned."""
        for instance in self.instances:
            instance.wakes()  # before it does: it goes on with its samples at once, and another may need longer
        posts = [(instance, instance.connection.post("/wake_up")) for instance in self.instances]
        await asyncio.gather(*(_obeyed(instance, post) for instance, post in posts))
        self._awake.set()


async def _obeyed(instance: "Instance", post: Coroutine[Any, Any, Any]) -> None:
    """End a server that cannot switch, to get a new instance: it may have kept the memory, or lost what was in it.

    Its users are not waited for: they may be waiting until it is awake.
    """
    try:
        async with asyncio.timeout(_SWITCHES_WITHIN_S):
            await post
    except (TinsmithError, TimeoutError):
        log.exception(
            "the vLLM server at %s is ended, because it does not fall asleep, or wake", instance.connection.url
        )
        await instance.end()


# Who may use an instance

BASE = ""
UNKNOWN = None
"""Key of weights that are being replaced, or could not be."""

_IMAGE_CACHE = 2**31
"""Bytes of pixel values that we expect a server to remember; vLLM's own limit is 4 GiB."""

_LOOK_AGAIN_S = 2.0
"""Seconds between two looks whether a silent engine has ended."""


class Slots(asyncio.Semaphore):
    """Slots of a server, one for each sequence that it may compute side by side."""

    @asynccontextmanager
    async def reserve(self, at_most: int) -> AsyncIterator[int]:
        """Hold `at_most` slots while the body runs, fewer if fewer are free or somebody waits; yields how many.

        Several are returned together, when the longest of their sequences has ended: those who wait could have used the
        others. One who has waited gets one, for meanwhile others may have taken what it wanted more for.
        """
        async with AsyncExitStack() as held:
            waits = self.locked()
            await held.enter_async_context(self)
            count = 1
            while count < at_most and not waits and not self.locked():  # it is locked too while somebody waits
                await held.enter_async_context(self)
                count += 1
            yield count


@dataclass(frozen=True, eq=False)
class _Waiting:
    key: str
    turn: "asyncio.Future[bool]"
    """Done when it may run; the result says whether it has to replace the weights first."""


class WeightsLock:
    """A lock that gives a server to one set of full weights at a time, in order of arrival.

    Requests for the weights that are there run side by side. A request for others waits until those have ended,
    replaces the weights, and lets all run that wait for the same.
    """

    def __init__(self) -> None:
        self.weights: str | None = BASE
        self.running = 0
        self.queue: deque[_Waiting] = deque()

    @asynccontextmanager
    async def holding(self, key: str, replace: Callable[[], Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Run the body while the server computes with the weights of that key.

        If others are there, `replace` is called before, alone.
        """
        must_replace = await self._wait(key)
        try:
            if must_replace:
                await _to_its_end(self._replace(key, replace))
                for other in [waiting for waiting in self.queue if waiting.key == key]:
                    self._let_in(other)
            yield
        finally:
            self._leave()

    def keep(self) -> Callable[[], None]:
        """Let the weights stay until the returned function is called, for work that may outlast its holder."""
        assert self.running, "nobody holds the weights"
        self.running += 1
        return self._leave

    async def _replace(self, key: str, replace: Callable[[], Awaitable[None]]) -> None:
        await replace()
        self.weights = key

    async def _wait(self, key: str) -> bool:
        waiting = _Waiting(key, asyncio.get_running_loop().create_future())
        self.queue.append(waiting)
        self._advance()
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if waiting in self.queue:
                self.queue.remove(waiting)
                self._advance()
            elif not waiting.turn.cancelled():  # it was let in at the same moment
                self._leave()
            raise

    def _advance(self) -> None:
        while self.queue and (self.queue[0].key == self.weights or not self.running):
            self._let_in(self.queue[0])

    def _let_in(self, waiting: _Waiting) -> None:
        self.queue.remove(waiting)
        if waiting.turn.cancelled():
            return
        must_replace = waiting.key != self.weights
        if must_replace:
            self.weights = UNKNOWN
        self.running += 1
        waiting.turn.set_result(must_replace)

    def _leave(self) -> None:
        self.running -= 1
        self._advance()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for work that must not stop half-way: a caller that is cancelled is told so when the work has ended."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):  # it may be cancelled more than once
                await asyncio.wait([task])
        raise


@dataclass(eq=False)
class Instance:
    """A server from one start to its end."""

    connection: Connection
    slots: Slots
    """Slots for samples."""
    spare_slot: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """One more, in which new weights are compared."""
    samples_per_request: int
    """Most samples of one prompt in one request."""
    started_by_us: bool
    """True if we have started it, so that it begins with the base's weights."""
    transfer_kind: TransferKind
    transfer: Transfer | None = None
    """The way for full weights, once some have been sent."""
    adapters: dict[str, "asyncio.Task[str]"] = field(default_factory=dict)
    """Key of the weights -> task that loads the adapter and returns its name at the server."""
    checks: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """Key of the weights -> task that compares the canary."""
    weights_lock: WeightsLock = field(default_factory=WeightsLock)
    label: str | None = None
    """Name of the server's full weights in replies; None if it does not say, or was not asked yet."""
    number: int = field(default_factory=itertools.count().__next__)
    """Different for every instance."""
    running: set[str] = field(default_factory=set)
    """Names by which the server can be told to abort requests."""
    refusal: str | None = None
    """Reason why it is not sampled from at all (`launch.py`)."""
    facts: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    """Tasks that find out label and refusal, and the kinds below (`verify.py`)."""
    merged_kinds: frozenset[str] = frozenset()
    """Kinds of layers to which it applies no adapters (`verify.py`); adapters that train one are merged."""
    refused_kinds: frozenset[str] = frozenset()
    """Those of them with which it differs from the trainer even then."""
    images: LRUCache[str, int] = field(default_factory=lambda: LRUCache(_IMAGE_CACHE, getsizeof=lambda size: size))
    """Size in bytes, by hash, of the images that the server has seen."""
    arriving: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    sleep_mode: SleepMode = field(default_factory=SleepMode)
    """Sleep mode, shared with the other servers of its base model."""
    ranks: int = 1
    """Workers over which the model is divided."""
    end: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(0)
    """Ends its process, if we have started it; returns when that holds no memory any more."""

    def wakes(self) -> None:
        """Forget which images it has seen and what was compared: it has slept."""
        self.images.clear()
        self.checks.clear()

    async def answers(self) -> bool:
        """Return whether server, engine and all workers answer, between two steps.

        For a moment the server does not know that its engine ends, and for some seconds the engine does not know that a
        worker has ended.
        """
        return (
            await self.is_alive()
            and await _succeeds(self.connection.get("/is_paused"))
            and await _succeeds(self.connection.post("/collective_rpc", {"method": "check_health", "args": []}))
        )

    async def is_alive(self) -> bool:
        """Return whether the server says that it and its engine are alive. It answers while the engine computes."""
        return await _succeeds(self.connection.get("/health"))

    async def look(self, within_s: float) -> Literal["answers", "silent", "lost"]:
        """Wait until its engine `answers` or is `lost`, with or without the server; `silent` after `within_s`.

        A server whose engine hangs still takes requests. One whose engine has ended waits for its requests before it
        ends too, some of which vLLM never answers; only /health tells of that.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while True:
                    async with running(_succeeds(self.connection.get("/is_paused"))) as asked:
                        while not asked.done():
                            await asyncio.wait([asked], timeout=_LOOK_AGAIN_S)
                            if not asked.done() and not await self.is_alive():
                                return "lost"
                    if asked.result():
                        return "answers"
                    if not await self.is_alive():
                        return "lost"
                    await asyncio.sleep(_LOOK_AGAIN_S)
        return "silent"


@asynccontextmanager
async def running(work: Coroutine[Any, Any, T]) -> AsyncIterator["asyncio.Task[T]"]:
    """Run a task beside the body, and cancel it when the body ends."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()


async def _succeeds(request: Coroutine[Any, Any, Any]) -> bool:
    """Return whether a request is answered without an error."""
    with suppress(ServerLostError, RefusedError, ServerFailedError):
        await request
        return True
    return False
