"""The client of one base model's vLLM servers: an event loop in a thread of its own, in which all samples run side by side.

A sample goes to one server. If that is lost the sample is sent to another, or to the same one once it is back with the weights it needs.
"""

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import uvloop

from tinsmith.errors import TinsmithError
from tinsmith.sampling.sampler import SampleResult
from tinsmith.sampling.vllm.connection import ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.following import Line, follow
from tinsmith.sampling.vllm.job import Job
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.sampling import sample
from tinsmith.sampling.vllm.servers import Launch, Life, Server, Servers
from tinsmith.sampling.vllm.version import Version

log = logging.getLogger(__name__)

T = TypeVar("T")

_STOPS_WITHIN_S = 5.0
"""How long the interpreter waits for the loop before it ends."""

_ATTEMPTS = 5
"""A sample that loses so many servers is likely to be the reason."""
_AWAY_FROM_HOME = 16
"""How many more sequences a server may have to do than the idlest, before prompts go elsewhere that begin like earlier ones there."""


class VLLMClient:
    """Runs jobs. Its methods may be called from any thread."""

    def __init__(self, sources: list[Launch | str], slots: int, hung_s: float, publisher: Publisher) -> None:
        """Each source is a server to start, or the URL of one that runs. See `Server` for `slots` and `hung_s`."""
        self.publisher = publisher
        self.lines: WeakValueDictionary[str, Line] = WeakValueDictionary()
        """Of inflight weights from which something is being sampled."""
        self.loop = uvloop.new_event_loop()
        thread = threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True)
        thread.start()
        atexit.register(_stop, self.loop, thread)
        self.servers = self.run(self._open(sources, slots, hung_s)).result()

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run something in the client's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def submit(self, job: Job, done: Callable[["Future[SampleResult]"], None]) -> "Future[SampleResult]":
        """Start a job; `done` is called in the client's thread."""
        future = self.run(self._sample(job))
        future.add_done_callback(done)
        return future

    def publish(self, version: Version) -> None:
        """Let the samples that follow the same model go on with this version, and make servers ready for it that can be."""
        self.run(self._publish(version))

    def forget(self, key: str) -> None:
        """Nothing refers to the weights of this key any more."""
        self.run(self.publisher.forget(self.servers.all, key))

    async def _open(self, sources: list[Launch | str], slots: int, hung_s: float) -> Servers:
        changed = asyncio.Condition()
        return Servers([Server(source, slots, hung_s, changed) for source in sources], changed)

    async def _sample(self, job: Job) -> SampleResult:
        lost, line = "", self._line(job)
        for _ in range(_ATTEMPTS):
            server, life = await self.servers.pick(job.keys, _AWAY_FROM_HOME)
            server.load += job.request.num_samples
            try:
                return await self._sample_on(life, job, line)
            except (ServerLostError, ServerFailedError) as error:
                if isinstance(error, ServerFailedError) and await life.answers():
                    raise
                lost = str(error)
                server.doubt(life, lost)
                log.warning("sample=%s is sent again: %s", job.request_id, lost)
            finally:
                server.load -= job.request.num_samples
        raise TinsmithError(f"{_ATTEMPTS} vLLM servers in a row were lost with this sample: {lost}")

    async def _sample_on(self, life: Life, job: Job, line: Line | None) -> SampleResult:
        if line is None:
            return await sample(self.publisher, life, job)
        return await follow(self.publisher, life, job, line)

    def _line(self, job: Job) -> Line | None:
        """The line that the job follows: others may be on it already."""
        model_id = job.version.ref.inflight_of
        if model_id is None:
            return None
        line = self.lines.get(model_id)
        if line is None:
            line = self.lines[model_id] = Line(job.version)
        return line

    async def _publish(self, version: Version) -> None:
        lives = [server.life for server in self.servers.all if server.state == "ready" and server.life is not None]
        model_id = version.ref.inflight_of
        if model_id is not None and model_id in self.lines:
            self.lines[model_id].renew(version)
        for prepared in await asyncio.gather(*(self.publisher.prepare(life, version) for life in lives), return_exceptions=True):
            if prepared is not None:
                log.info("%s is not ready yet on a vLLM server: %s", version, prepared)


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End the loop before the interpreter ends, which it would not survive."""
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_STOPS_WITHIN_S)
