"""Getting weights onto a server before a request that needs them, and off again when nothing refers to them any more.

Adapters lie side by side, each under a name of its own, over the base's weights. Full weights take the place of the base's: requests that
need others wait until those that run have ended, in the order in which they came.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from tinsmith.errors import TinsmithError
from tinsmith.models.full import FullWeights
from tinsmith.models.lora import Adapter
from tinsmith.sampling.inside_vllm.identity import identity
from tinsmith.sampling.vllm.canary import Canary
from tinsmith.sampling.vllm.connection import RefusedError, ServerFailedError
from tinsmith.sampling.vllm.gate import BASE, UNKNOWN
from tinsmith.sampling.vllm.generate import score
from tinsmith.sampling.vllm.parameters import scoring_params
from tinsmith.sampling.vllm.servers import Life, Server
from tinsmith.sampling.vllm.tasks import once
from tinsmith.sampling.vllm.transfers import Tensors, Transfer, new_transfer
from tinsmith.sampling.vllm.version import Version
from tinsmith.sampling.vllm.weights import WeightFiles

log = logging.getLogger(__name__)

_LABEL = "tinsmith:"
"""How the names begin by which servers call the weights that we have given them."""


class Publisher:
    """Publishes the weights of one base model. Used in one event loop."""

    def __init__(self, files: WeightFiles, canary: Canary) -> None:
        self.files = files
        self.canary = canary
        self.device = canary.base.device
        self._transfers = itertools.count(1)
        self.folders: dict[str, asyncio.Task[Path]] = {}
        """By the key of an adapter: writes its files, and gives their directory."""

    @asynccontextmanager
    async def serving(self, life: Life, version: Version) -> AsyncIterator[str | None]:
        """The name to ask a server for while the body runs: None means what the server itself computes with.

        The canary is compared meanwhile. Raises TinsmithError if the server refuses the weights, and afterwards, so that nothing that the
        body has got may be used, if it computes something else with them than the trainer does.
        """
        await self._identify(life)
        async with life.gate.passing(_full_key(version), partial(self._transfer, life, version.full)):
            name = None
            if version.adapter is not None:
                name = await self._loaded(life, version.ref.key, version.adapter)
            checked = self._checked(life, version, name)
            try:
                yield name
            except TinsmithError:
                await checked  # wrong weights are taken off the server at once: then that is the error
                raise
            await checked

    async def prepare(self, life: Life, version: Version) -> None:
        """Load an adapter and compare it before a request asks, as far as nobody has to wait for that. Raises as `serving`."""
        if version.adapter is None:
            return
        await self._identify(life)
        if life.gate.weights == BASE and not life.gate.line:
            async with self.serving(life, version):
                pass
        else:
            await self._loaded(life, version.ref.key, version.adapter)

    async def forget(self, servers: list[Server], key: str) -> None:
        """Take an adapter off all servers and delete its files: nothing samples from it any more.

        If it is sampled from again later it gets other files, and so another name on the servers.
        """
        folder = self.folders.pop(key, None)
        lives = [server.life for server in servers if server.life is not None]
        for life in lives:
            life.checks.pop(key, None)
        for life, task in [(life, life.adapters.pop(key)) for life in lives if key in life.adapters]:
            try:
                await self._unload(life, await task)
            except TinsmithError as error:
                log.warning("adapter %s stays on a vLLM server: %s", key, error)
        if folder is not None:
            await asyncio.to_thread(self.files.remove, await folder)

    async def _identify(self, life: Life) -> None:
        """Ask a server once what it calls its weights. vLLM 0.26 cannot say."""
        if life.identified:
            return
        label = None
        with suppress(RefusedError):
            label = (await life.connection.get("/weight_info"))["weight_version"]
        if not life.identified:
            life.identified, life.label = True, label
            if not life.is_ours and (label is None or label.startswith(_LABEL)):  # perhaps an engine before us has left its weights there
                life.gate.weights = UNKNOWN

    def _checked(self, life: Life, version: Version, name: str | None) -> "asyncio.Future[None]":
        """The comparison of the canary, which all who sample from these weights share. The weights stay until it has ended."""
        is_new = version.ref.key not in life.checks
        checked = once(life.checks, version.ref.key, partial(self._check, life, version, name))
        if is_new:
            leave = life.gate.stay()
            life.checks[version.ref.key].add_done_callback(lambda _: leave())
        return checked

    async def _check(self, life: Life, version: Version, name: str | None) -> None:
        reply = await score(life, self.canary.rendered, scoring_params(0), name)
        try:
            self.canary.compare(reply["prompt_logprobs"], version.canary, str(version))
        except TinsmithError:
            if life.adapters.pop(version.ref.key, None) is not None and name is not None:
                await self._unload(life, name)
            raise

    async def _loaded(self, life: Life, key: str, adapter: Adapter) -> str:
        """The name of an adapter that is on the server now."""
        return await once(life.adapters, key, partial(self._load, life, key, adapter))

    async def _load(self, life: Life, key: str, adapter: Adapter) -> str:
        path = await once(self.folders, key, partial(asyncio.to_thread, self.files.write, adapter))
        # A server that is not ours may know the adapter from another life. It compares what it has loaded with the identity at the end.
        name = f"{self.files.root.name}-{life.number}-{path.name}-{await asyncio.to_thread(self.files.identity, adapter)}"
        await life.connection.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        if not await _has_compared(life, name):
            await self._unload(life, name)
            raise TinsmithError(
                f"the vLLM server at {life.connection.address} does not compare adapters with the trainer's; start it with "
                "--worker-extension-cls tinsmith.sampling.inside_vllm.worker.WorkerExtension of this version of Tinsmith"
            )
        return name

    async def _unload(self, life: Life, name: str) -> None:
        await life.connection.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _transfer(self, life: Life, weights: FullWeights | None) -> None:
        """Replace the weights that the server computes with. Nothing runs there meanwhile.

        After a failure the server holds nothing that could be sampled from, but the next attempt can begin.
        """
        transfer = life.transfer or await self._opened(life)
        life.transfer = None
        await life.connection.post("/pause", mode="wait", clear_cache="false")  # pictures stay; prefixes are reset below
        try:
            await self._send(life, transfer, self.files.tensors(weights), f"{_LABEL}{self.files.root.name}-{next(self._transfers)}")
            life.transfer = transfer
        finally:
            if life.transfer is None:
                with suppress(RefusedError, ServerFailedError):  # there may be nothing to finish
                    await life.connection.post("/finish_weight_update", {})
            await life.connection.post("/resume")
        life.checks.clear()  # adapters too are computed over what has just come

    async def _opened(self, life: Life) -> Transfer:
        transfer = new_transfer(life.transfer_kind, self.files.root, self.device)
        await transfer.open(life.connection)
        return transfer

    async def _send(self, life: Life, transfer: Transfer, tensors: Tensors, label: str) -> None:
        post = life.connection.post
        await post("/start_weight_update")
        await transfer.send(life.connection, tensors, await asyncio.to_thread(identity, tensors.items()))
        await post("/finish_weight_update", {"weight_version": label})
        await post("/reset_prefix_cache", reset_running_requests="true")
        if life.label is not None:
            life.label = label


async def _has_compared(life: Life, name: str) -> bool:
    """Whether all workers of a server have compared an adapter (`adapter_check.py`)."""
    try:
        reply = await life.connection.post("/collective_rpc", {"method": "tinsmith_checked_adapter", "args": [name]})
    except (RefusedError, ServerFailedError):  # it has no such method
        return False
    return all(result["checked"] for result in reply["results"])


def _full_key(version: Version) -> str:
    """The key of the full weights that a version takes, which for an adapter are the base's."""
    return version.ref.key if version.full is not None else BASE
