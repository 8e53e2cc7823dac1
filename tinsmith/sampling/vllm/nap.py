"""Sleep of the vLLM servers of one base model while the trainer has the GPU that they share (--vllm-turn-s).

Asleep (vLLM's level 1), a server has its weights and adapters in the host's memory, and no cache. Samples under way are kept, and go on
when it has woken, which computes their keys and values again. What would write to the memory of a server that sleeps waits.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tinsmith.errors import TinsmithError

if TYPE_CHECKING:
    from tinsmith.sampling.vllm.instance import Instance

log = logging.getLogger(__name__)

_SWITCHES_WITHIN_S = 120.0
"""How long a server may take to fall asleep or to wake. Weights of 100 GB are copied in seconds."""


class Nap:
    """Whether the servers of a base model are awake. Made and used in one event loop; they begin awake."""

    def __init__(self) -> None:
        self.instances: set[Instance] = set()
        """Servers that run, and hold memory of the GPU while they are awake."""
        self._awake, self._idle = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._idle.set()
        self._kept = 0

    @property
    def is_put_off(self) -> bool:
        """Whether the servers are to fall asleep, and something keeps one of them awake."""
        return not self._awake.is_set() and self._kept > 0

    async def until_awake(self) -> None:
        """Return when the servers are awake. They may fall asleep again at any time."""
        while not self._awake.is_set():
            await self._awake.wait()

    @asynccontextmanager
    async def kept_awake(self) -> AsyncIterator[None]:
        """Run the body while the servers are awake and stay so. The body must not come here again: they may be falling asleep."""
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
        """Put all servers to sleep, once nothing keeps them awake. Afterwards none has more of the GPU than it needs to run at all."""
        self._awake.clear()
        await self._idle.wait()
        posts = [(instance, instance.connection.post("/sleep", level="1", mode="keep")) for instance in self.instances]
        await asyncio.gather(*(_obeyed(instance, post) for instance, post in posts))

    async def wake_up(self) -> None:
        """Wake all servers. What they compute with any weights is compared again before it is returned."""
        for instance in self.instances:
            instance.wakes()  # before it does: it goes on with its samples at once, and another may need longer
        posts = [(instance, instance.connection.post("/wake_up")) for instance in self.instances]
        await asyncio.gather(*(_obeyed(instance, post) for instance, post in posts))
        self._awake.set()


async def _obeyed(instance: "Instance", post: Coroutine[Any, Any, Any]) -> None:
    """A server that cannot is ended, and returns as a new instance: it may have kept the memory, or lost what was in it.

    Nobody who uses the server is waited for: they may be waiting until it is awake.
    """
    try:
        async with asyncio.timeout(_SWITCHES_WITHIN_S):
            await post
    except (TinsmithError, TimeoutError):
        log.exception("the vLLM server at %s is ended, because it does not fall asleep, or wake", instance.connection.url)
        await instance.end()
