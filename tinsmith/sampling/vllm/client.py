"""The client of one base model's vLLM servers: an event loop in its own thread runs all requests side by side.

A request whose server is lost is sent to another, or to the same one once that is back with the weights it needs.
"""

import asyncio
import atexit
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import uvloop

from tinsmith.errors import TinsmithError
from tinsmith.sampling.sampler import SampleResult
from tinsmith.sampling.vllm.instance import SleepMode
from tinsmith.sampling.vllm.job import Job, NewestWeights, sample, sample_in_segments
from tinsmith.sampling.vllm.protocol import ServerFailedError, ServerLostError
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.servers import Launch, Server, Servers
from tinsmith.sampling.vllm.verify import PublishedWeights

log = logging.getLogger(__name__)

T = TypeVar("T")

_STOPS_WITHIN_S = 5.0

_ATTEMPTS = 5
"""Servers that a request may lose: one that loses so many is likely to be the reason."""
_MAX_LEAD = 16
"""Sequences that a server may have beyond the idlest, and still get prompts that begin like earlier ones there."""


class VLLMClient:
    """Runs jobs. Its methods may be called from any thread."""

    def __init__(self, sources: list[Launch | str], slots: int, hung_s: float, publisher: Publisher) -> None:
        """Each source is a server to start, or the URL of one that runs. See `Server` for `slots` and `hung_s`."""
        self.publisher = publisher
        self.newest: dict[str, NewestWeights] = {}
        """Model id -> newest weights, for models with inflight samples under way."""
        self.sleep_mode = SleepMode()
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="vllm", daemon=True)
        self.thread.start()
        atexit.register(self.close)  # the interpreter would not survive a loop that still runs
        self.servers = self.run(self._open(sources, slots, hung_s)).result()

    def run(self, work: Coroutine[Any, Any, T], then: Callable[[], None] | None = None) -> "Future[T]":
        """Run something in the client's event loop; `then` is called there at its end."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        if then is not None:
            future.add_done_callback(lambda _: then())
        return future

    def publish(self, published: PublishedWeights) -> None:
        """Let samples that follow the same model go on with these weights, and prepare the servers that are ready."""
        self.run(self._publish(published))

    def forget(self, key: str) -> None:
        """Take weights that nothing refers to any more off all servers."""
        self.run(self._forget(key))

    def close(self) -> None:
        """End the servers that it has started, leave the others, and drop what is under way."""
        atexit.unregister(self.close)
        ending = self.run(_cancel_everything())
        with suppress(TimeoutError):
            ending.result(_STOPS_WITHIN_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(_STOPS_WITHIN_S)

    async def _open(self, sources: list[Launch | str], slots: int, hung_s: float) -> Servers:
        changed = asyncio.Condition()
        try_out = self.publisher.tryout.try_out
        return Servers(
            [Server(source, slots, hung_s, changed, try_out, self.sleep_mode) for source in sources], changed
        )

    async def sample(self, job: Job) -> SampleResult:
        """Return the result of a job, on whatever servers it takes. For the client's loop."""
        with self._newest(job) as newest:
            return await self._sample(job, newest)

    async def _sample(self, job: Job, newest: NewestWeights | None) -> SampleResult:
        lost = ""
        for _ in range(_ATTEMPTS):
            server, instance = await self.servers.pick(job.keys, _MAX_LEAD)
            server.load += job.request.num_samples
            try:
                if newest is None:
                    return await sample(self.publisher, instance, job)
                return await sample_in_segments(self.publisher, instance, job, newest)
            except (ServerLostError, ServerFailedError) as error:
                if isinstance(error, ServerFailedError) and await instance.answers():
                    raise
                lost = str(error)
                server.suspect(instance, lost)
                log.warning("sample=%s is sent again: %s", job.request_id, lost)
            finally:
                server.load -= job.request.num_samples
        raise TinsmithError(f"{_ATTEMPTS} vLLM servers in a row were lost with this sample: {lost}")

    @contextmanager
    def _newest(self, job: Job) -> Iterator[NewestWeights | None]:
        """Hold the weights that the job follows; None if it needs no segments.

        A streamed job that is not inflight follows its own. The weights are forgotten with the last job, and not when
        its error is: what failed would be followed by the next.
        """
        model_id = job.published.ref.inflight_of
        if model_id is None:
            yield None if job.tell is None else NewestWeights(job.published)
            return
        newest = self.newest.setdefault(model_id, NewestWeights(job.published))
        newest.followers += 1
        try:
            yield newest
        finally:
            newest.followers -= 1
            if not newest.followers:
                del self.newest[model_id]

    async def _forget(self, key: str) -> None:
        await self.publisher.loader.forget(self.servers.instances, key)

    async def _publish(self, published: PublishedWeights) -> None:
        instances = [
            server.instance for server in self.servers.all if server.state == "ready" and server.instance is not None
        ]
        model_id = published.ref.inflight_of
        if model_id is not None and model_id in self.newest:
            self.newest[model_id].replace(published)
        preparing = [self.publisher.prepare(instance, published) for instance in instances]
        for failed in await asyncio.gather(*preparing, return_exceptions=True):
            if failed is not None:
                log.info("%s is not ready yet on a vLLM server: %s", published, failed)


async def _cancel_everything() -> None:
    """Cancel all that runs in this loop, and wait until it has tidied up."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
