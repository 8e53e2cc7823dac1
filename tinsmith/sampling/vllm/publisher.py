"""Gets weights onto a server before a request that needs them, and compares them.

    write     an adapter becomes files; full weights become tensors by their names in the checkpoint (`weights.py`)
    load      the server reads them, and compares their identity with the trainer's (`loader.py`)
    verify    the server scores the canary, as the trainer has (`verify.py`)

Before the first adapter, a server shows with probes what of an adapter it applies (`verify.py`).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from tinsmith.errors import TinsmithError
from tinsmith.sampling.vllm.instance import BASE, Instance
from tinsmith.sampling.vllm.loader import WeightLoader, once
from tinsmith.sampling.vllm.verify import Canary, PublishedWeights, TryOut


@dataclass(frozen=True, eq=False)
class Loaded:
    """Weights that a server computes with as long as they are held."""

    model: str | None
    """The name to ask the server for; None means what it computes with by itself."""
    compared: "asyncio.Future[None]"
    """Done when the canary was compared. Raises TinsmithError if vLLM computes something else than the trainer."""


class Publisher:
    """Publishes the weights of one base model. For one event loop."""

    def __init__(self, canary: Canary, loader: WeightLoader, tryout: TryOut) -> None:
        self.canary = canary
        self.loader = loader
        self.tryout = tryout

    @asynccontextmanager
    async def using(self, instance: Instance, published: PublishedWeights) -> AsyncIterator[Loaded]:
        """Run the body while the server computes with these weights; the canary is compared at the same time.

        Raises TinsmithError if the server refuses the weights. If it computes something else with them than the
        trainer, that is raised after the body, which must then not use what it has got.
        """
        await self.tryout.learn_about(instance)
        adapter = published.adapter
        if adapter is not None:
            await self.tryout.try_out(instance)  # nothing is known if that failed when the server was new
        merged = self.tryout.is_merged(instance, adapter.masters if adapter is not None else ())
        full = published.weights if merged else published.full
        async with instance.weights_lock.holding(
            BASE if full is None else published.ref.key, partial(self.loader.replace, instance, full)
        ):
            name = None
            if adapter is not None and not merged:
                name = await self.loader.load(instance, published.ref.key, adapter)
            compared = self._compared(instance, published, name)
            try:
                yield Loaded(name, compared)
            except TinsmithError:
                await compared  # wrong weights are taken off the server at once: then that is the error
                raise
            await compared
            await self._compared(instance, published, name)  # again, if it has slept since

    async def prepare(self, instance: Instance, published: PublishedWeights) -> None:
        """Load an adapter, and compare it if nobody has to wait for that, before a request needs it.

        Raises as `using`.
        """
        if published.adapter is None:
            return
        await self.tryout.try_out(instance)
        if self.tryout.is_merged(instance, published.adapter.masters):
            return
        if instance.weights_lock.weights == BASE and not instance.weights_lock.queue:
            async with self.using(instance, published):
                pass
        else:
            await self.loader.load(instance, published.ref.key, published.adapter)

    def _compared(self, instance: Instance, published: PublishedWeights, name: str | None) -> "asyncio.Future[None]":
        """Compare the canary once for all requests for these weights, which stay on the server until that has ended."""
        is_new = published.ref.key not in instance.checks
        compared = once(instance.checks, published.ref.key, partial(self._compare, instance, published, name))
        if is_new:
            leave = instance.weights_lock.keep()
            instance.checks[published.ref.key].add_done_callback(lambda _: leave())
        return compared

    async def _compare(self, instance: Instance, published: PublishedWeights, name: str | None) -> None:
        scores = await self.canary.scored_by(instance, name)
        try:
            self.canary.compare(scores, published.canary, str(published))
        except TinsmithError:
            if instance.adapters.pop(published.ref.key, None) is not None and name is not None:
                await self.loader.take_off(instance, name)
            raise
