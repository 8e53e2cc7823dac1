"""Getting weights onto a server before a request that needs them, and off again when nothing refers to them any more.

Adapters lie side by side, each under a name of its own, over the base's weights. Full weights take the place of the base's: requests that
need others wait until those that run have ended, in the order in which they came.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter
from tinsmith.vllm.canary import Canary
from tinsmith.vllm.gate import BASE, UNKNOWN
from tinsmith.vllm.generate import generate
from tinsmith.vllm.parameters import scoring_params
from tinsmith.vllm.servers import Life, Server
from tinsmith.vllm.weights import WeightFiles

log = logging.getLogger(__name__)

_LABEL = "tinsmith:"
"""How the names begin by which servers call the weights that we have given them."""


@dataclass(frozen=True, eq=False)
class Version:
    """Weights to sample from."""

    weights: Weights | None
    """None are the base's."""
    canary: NDArray[np.float32]
    """What the trainer makes of the canary prompt with them."""

    @property
    def uid(self) -> int:
        """Their number."""
        return self.weights.uid if self.weights is not None else BASE

    @property
    def full(self) -> FullWeights | None:
        """What takes the place of the base's weights."""
        return self.weights if isinstance(self.weights, FullWeights) else None

    def __str__(self) -> str:
        kind = {Adapter: "adapter", FullWeights: "full weights"}.get(type(self.weights))
        return f"{kind} {self.uid}" if kind else "the base weights"


class Publisher:
    """Publishes the weights of one base model. Used in one event loop."""

    def __init__(self, files: WeightFiles, canary: Canary) -> None:
        self.files = files
        self.canary = canary

    @asynccontextmanager
    async def serving(self, life: Life, version: Version) -> AsyncIterator[str | None]:
        """The name to ask a server for while the body runs: None means what the server itself computes with.

        Raises TinsmithError if the server refuses the weights, or computes something else with them than the trainer does.
        """
        await self._identify(life)
        async with life.gate.passing(_number(version.full), partial(self._transfer, life, version.full)):
            yield await self._published(life, version)

    async def forget(self, servers: list[Server], uid: int) -> None:
        """Take an adapter off all servers and delete its files: nothing samples from it any more."""
        for life in [server.life for server in servers if server.life is not None]:
            task = life.published.pop(uid, None)
            try:
                if task is not None and (name := await task) is not None:
                    await life.connection.post("/v1/unload_lora_adapter", {"lora_name": name})
            except TinsmithError as error:
                log.warning("adapter %d stays on a vLLM server: %s", uid, error)
        await asyncio.to_thread(self.files.remove, uid)

    async def _identify(self, life: Life) -> None:
        """Ask a server once what it calls its weights."""
        if life.label is None:
            label = (await life.connection.get("/weight_info"))["weight_version"]
            if life.label is None:
                life.label = label
                if label.startswith(_LABEL):  # an engine before us has left its weights there
                    life.gate.weights = UNKNOWN

    async def _published(self, life: Life, version: Version) -> str | None:
        task = life.published.get(version.uid)
        if task is None:
            task = life.published[version.uid] = asyncio.create_task(self._publish(life, version))
            task.add_done_callback(partial(_forget_failure, life, version.uid))
        return await asyncio.shield(task)  # others wait for it too

    async def _publish(self, life: Life, version: Version) -> str | None:
        name = await self._load(life, version.weights) if isinstance(version.weights, Adapter) else None
        try:
            reply = await generate(life, self.canary.rendered, scoring_params(0), name)
            self.canary.compare(reply["prompt_logprobs"], version.canary, str(version))
        except TinsmithError:
            if name is not None:
                await life.connection.post("/v1/unload_lora_adapter", {"lora_name": name})
            raise
        return name

    async def _load(self, life: Life, adapter: Adapter) -> str:
        path = await asyncio.to_thread(self.files.adapter, adapter)
        name = f"{self.files.root.name}-{adapter.uid}"
        await life.connection.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        return name

    async def _transfer(self, life: Life, weights: FullWeights | None) -> None:
        """Replace the weights that the server computes with. Nothing runs there meanwhile."""
        file = await asyncio.to_thread(self.files.model, weights)
        try:
            await life.connection.post("/pause", mode="wait")
            await self._send(life, file, f"{_LABEL}{self.files.root.name}-{_number(weights)}")
            await life.connection.post("/resume")
        finally:
            file.unlink()
        life.published.pop(_number(weights), None)  # its canary is due again

    async def _send(self, life: Life, file: Path, label: str) -> None:
        post = life.connection.post
        await post("/start_weight_update")
        await post("/update_weights", {"update_info": {"path": str(file)}})
        await post("/finish_weight_update", {"weight_version": label})
        await post("/reset_prefix_cache", reset_running_requests="true")
        life.label = label


def _forget_failure(life: Life, uid: int, task: "asyncio.Task[str | None]") -> None:
    """Who comes next tries again."""
    if task.cancelled() or task.exception() is not None:
        life.published.pop(uid, None)


def _number(weights: FullWeights | None) -> int:
    return weights.uid if weights is not None else BASE
