"""Loads weights into vLLM servers, and takes adapters off again.

Adapters lie side by side on a server, over the base's weights. Full weights replace the base's (`WeightsLock` says
when).
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.errors import TinsmithError
from tinsmith.models.full import Weights
from tinsmith.models.lora import Adapter
from tinsmith.protocol.boundary import failing_into
from tinsmith.sampling.inside_vllm.identity import identity
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.protocol import Connection, RefusedError, ServerFailedError
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, Tensors, Transfer, WeightFiles, new_transfer

log = logging.getLogger(__name__)

T = TypeVar("T")

LABEL = "tinsmith:"
"""Prefix of the names that servers have for full weights that we sent them."""


def once(
    tasks: "MutableMapping[str, asyncio.Task[T]]", key: str, work: Callable[[], Coroutine[Any, Any, T]]
) -> "asyncio.Future[T]":
    """Share work among all callers with this key.

    It goes on if they give up; if it fails, the next caller tries again.
    """
    task = tasks.get(key)
    if task is None:
        task = tasks[key] = asyncio.create_task(work())
        task.add_done_callback(partial(_forget_failure, tasks, key))
    return asyncio.shield(task)


def _forget_failure(tasks: "MutableMapping[str, asyncio.Task[T]]", key: str, task: "asyncio.Task[T]") -> None:
    if (task.cancelled() or task.exception() is not None) and tasks.get(key) is task:
        del tasks[key]


class WeightLoader:
    """Loads the weights of one base model. For one event loop."""

    def __init__(self, files: WeightFiles, longest_broadcast_s: float = LONGEST_BROADCAST_S) -> None:
        self.files = files
        self.longest_broadcast_s = longest_broadcast_s
        self._transfers = itertools.count(1)
        self.folders: dict[str, asyncio.Task[Path]] = {}
        """Key of an adapter -> task that writes its files and returns their directory."""

    async def load(self, instance: Instance, key: str, adapter: Adapter) -> str:
        """Load an adapter unless the server has it, and return its name there."""
        return await once(instance.adapters, key, partial(self._load, instance, key, adapter))

    async def _load(self, instance: Instance, key: str, adapter: Adapter) -> str:
        began = time.monotonic()
        path = await once(self.folders, key, partial(asyncio.to_thread, self.files.write, adapter))
        # Another name for every instance, because a server that we did not start may have the adapter of a former one.
        # The server compares what it has loaded with the identity at the end.
        name = (
            f"{self.files.root.name}-{instance.number}-{path.name}-"
            f"{await asyncio.to_thread(self.files.identity, adapter)}"
        )
        written = time.monotonic()
        async with instance.sleep_mode.kept_awake():
            loading = time.monotonic()
            await instance.connection.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            loaded = time.monotonic()
            checked = await _has_compared(instance, name)
            if not checked:
                await _unload(instance, name)
        if not checked:
            raise TinsmithError(
                f"the vLLM server at {instance.connection.url} does not compare adapters with the trainer's; "
                "start it with --worker-extension-cls tinsmith.sampling.inside_vllm.worker.WorkerExtension of "
                "this version of Tinsmith"
            )
        log.info(
            "adapter %s is on the vLLM server at %s: %.0f ms to write it, %.0f to load it",
            key,
            instance.connection.url,
            1000 * (written - began),
            1000 * (loaded - loading),
        )
        return name

    async def take_off(self, instance: Instance, name: str) -> None:
        async with instance.sleep_mode.kept_awake():
            await _unload(instance, name)

    async def forget(self, instances: list[Instance], key: str) -> None:
        """Take an adapter that nothing samples from off these servers, which are all, and delete its files.

        If it is sampled from again it gets other files, and so another name on the servers.
        """
        folder = self.folders.pop(key, None)
        for instance in instances:
            instance.checks.pop(key, None)
        for instance, task in [
            (instance, instance.adapters.pop(key)) for instance in instances if key in instance.adapters
        ]:
            with failing_into(partial(log.warning, "adapter %s stays on a vLLM server: %s", key)):
                await self.take_off(instance, await task)
        if folder is not None:
            with suppress(TinsmithError):  # they could not be written
                await asyncio.to_thread(self.files.remove, await folder)

    async def replace(self, instance: Instance, weights: Weights | None) -> None:
        """Replace the weights that the server computes with; an adapter is merged into the base's.

        Nothing runs there meanwhile.

        After a failure the server holds nothing that could be sampled from, but the next attempt can begin.
        """
        tensors = await asyncio.to_thread(self.files.tensors, weights)
        post = instance.connection.post
        async with instance.sleep_mode.kept_awake():
            transfer = instance.transfer
            if transfer is None:
                kind, device = instance.transfer_kind, self.files.base.device
                transfer = new_transfer(kind, self.files.root, device, instance.ranks, self.longest_broadcast_s)
                await transfer.open(instance.connection)
            instance.transfer = None
            await post("/pause", mode="wait", clear_cache="false")  # images stay; prefixes are reset below
            async with AsyncExitStack() as failing:
                failing.push_async_callback(_give_up, instance.connection)
                await self._send(instance, transfer, tensors)
                failing.pop_all()
            instance.transfer = transfer
            await post("/resume")
        instance.checks.clear()  # adapters too are computed over what has just come

    async def _send(self, instance: Instance, transfer: Transfer, tensors: Tensors) -> None:
        post, label = instance.connection.post, f"{LABEL}{self.files.root.name}-{next(self._transfers)}"
        await post("/start_weight_update")
        await transfer.send(instance.connection, tensors, await asyncio.to_thread(identity, tensors.items()))
        await post("/finish_weight_update", {"weight_version": label})
        await post("/reset_prefix_cache", reset_running_requests="true")
        if instance.label is not None:
            instance.label = label


async def _give_up(server: Connection) -> None:
    """End a transfer that has failed, whose error is what is told, whatever becomes of the server now."""
    with suppress(TinsmithError):  # there may be nothing to finish
        await server.post("/finish_weight_update", {})
    with suppress(TinsmithError):
        await server.post("/resume")


async def _unload(instance: Instance, name: str) -> None:
    await instance.connection.post("/v1/unload_lora_adapter", {"lora_name": name})


async def _has_compared(instance: Instance, name: str) -> bool:
    """Return whether all workers of a server have compared an adapter (`inside_vllm/worker.py`)."""
    with suppress(RefusedError, ServerFailedError):  # it has no such method
        reply = await instance.connection.post(
            "/collective_rpc", {"method": "tinsmith_checked_adapter", "args": [name]}
        )
        return all(result["checked"] for result in reply["results"])
    return False
