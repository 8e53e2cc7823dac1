"""Gets weights onto a server before a request that needs them, compares them, and takes them off when nothing refers to them any more.

    write     an adapter becomes files; full weights become tensors by their names in the checkpoint
    load      the server reads them, and compares their identity with the trainer's
    verify    the server scores the canary, as the trainer has; a new server shows with probes what of an adapter it applies

Adapters lie side by side on a server, over the base's weights. Full weights replace the base's; requests that need others wait in order
(`WeightsLock`).
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.full import Weights
from tinsmith.models.layout import HEAD_WEIGHT, LM_HEAD
from tinsmith.models.lora import Adapter
from tinsmith.protocol.boundary import failing_into
from tinsmith.sampling.inside_vllm.identity import identity
from tinsmith.sampling.vllm.generate import score
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Instance
from tinsmith.sampling.vllm.launch import has_delta_nets, refusal
from tinsmith.sampling.vllm.protocol import RefusedError, ServerFailedError, scoring_params
from tinsmith.sampling.vllm.servers import Server
from tinsmith.sampling.vllm.verify import AdapterProbe, Canary, PublishedWeights, kind_of
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, Tensors, Transfer, WeightFiles, new_transfer

log = logging.getLogger(__name__)

T = TypeVar("T")

_LABEL = "tinsmith:"
"""Prefix of the names that servers have for full weights that we sent them."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """Weights that a server computes with as long as they are held."""

    model: str | None
    """The name to ask the server for; None means what it computes with by itself."""
    compared: "asyncio.Future[None]"
    """Done when the canary was compared. Raises TinsmithError if vLLM computes something else than the trainer."""


def once(tasks: "MutableMapping[str, asyncio.Task[T]]", key: str, work: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Future[T]":
    """Share work among all callers with this key. It goes on if they give up; if it fails, the next caller tries again."""
    task = tasks.get(key)
    if task is None:
        task = tasks[key] = asyncio.create_task(work())
        task.add_done_callback(partial(_forget_failure, tasks, key))
    return asyncio.shield(task)


def _forget_failure(tasks: "MutableMapping[str, asyncio.Task[T]]", key: str, task: "asyncio.Task[T]") -> None:
    if (task.cancelled() or task.exception() is not None) and tasks.get(key) is task:
        del tasks[key]


class Publisher:
    """Publishes the weights of one base model. For one event loop."""

    def __init__(
        self,
        files: WeightFiles,
        canary: Canary,
        served_on: torch.device,
        probes: Sequence[AdapterProbe] = (),
        longest_broadcast_s: float = LONGEST_BROADCAST_S,
    ) -> None:
        """Each new instance is asked which of the `probes` it applies. Servers compute on devices like `served_on`."""
        self.files = files
        self.canary = canary
        self.probes = probes
        self.device = canary.base.device
        self.served_on = served_on
        self.longest_broadcast_s = longest_broadcast_s
        self._transfers = itertools.count(1)
        self.folders: dict[str, asyncio.Task[Path]] = {}
        """Key of an adapter -> task that writes its files and returns their directory."""

    @asynccontextmanager
    async def using(self, instance: Instance, published: PublishedWeights) -> AsyncIterator[Loaded]:
        """Run the body while the server computes with these weights; the canary is compared at the same time.

        Raises TinsmithError if the server refuses the weights. If it computes something else with them than the trainer, that is raised
        after the body, which must then not use what it has got.
        """
        await self._learn_about(instance)
        if published.adapter is not None:
            await self.try_probes(instance)  # nothing is known if that failed when the server was new
        merged = self.is_merged(instance, published.adapter.masters if published.adapter is not None else ())
        full = published.weights if merged else published.full
        async with instance.weights_lock.holding(BASE if full is None else published.ref.key, partial(self._transfer, instance, full)):
            name = None
            if published.adapter is not None and not merged:
                name = await self._load_once(instance, published.ref.key, published.adapter)
            compared = self._compared(instance, published, name)
            try:
                yield Loaded(name, compared)
            except TinsmithError:
                await compared  # wrong weights are taken off the server at once: then that is the error
                raise
            await compared
            await self._compared(instance, published, name)  # again, if it has slept since

    async def prepare(self, instance: Instance, published: PublishedWeights) -> None:
        """Load an adapter, and compare it if nobody has to wait for that, before a request needs it. Raises as `using`."""
        if published.adapter is None:
            return
        await self.try_probes(instance)
        if self.is_merged(instance, published.adapter.masters):
            return
        if instance.weights_lock.weights == BASE and not instance.weights_lock.queue:
            async with self.using(instance, published):
                pass
        else:
            await self._load_once(instance, published.ref.key, published.adapter)

    async def forget(self, servers: list[Server], key: str) -> None:
        """Take an adapter that nothing samples from off all servers, and delete its files.

        If it is sampled from again it gets other files, and so another name on the servers.
        """
        folder = self.folders.pop(key, None)
        instances = [server.instance for server in servers if server.instance is not None]
        for instance in instances:
            instance.checks.pop(key, None)
        for instance, task in [(instance, instance.adapters.pop(key)) for instance in instances if key in instance.adapters]:
            with failing_into(partial(log.warning, "adapter %s stays on a vLLM server: %s", key)):
                await self._take_off(instance, await task)
        if folder is not None:
            with suppress(TinsmithError):  # they could not be written
                await asyncio.to_thread(self.files.remove, await folder)

    def is_merged(self, instance: Instance, targets: Iterable[str]) -> bool:
        """Return whether an instance takes adapters with these targets merged into the base's weights. Full weights have no targets.

        Raises UserError if it can compute with them in neither way, or is not sampled from at all.
        """
        if instance.refusal is not None:
            raise UserError(instance.refusal)
        kinds = {kind_of(target) for target in targets}
        if not kinds & instance.merged_kinds:
            return False
        refused = kinds & instance.refused_kinds
        if LM_HEAD in kinds and self.canary.base.head_name != HEAD_WEIGHT:
            left_out = ", ".join(sorted(kinds & instance.merged_kinds))
            raise UserError(
                f"vLLM applies no adapters to {left_out} of {self.canary.base.name}. They cannot be merged either, because its output "
                "projection is its embedding too: create the model with train_unembed=False, or serve it with --sampler local"
            )
        if refused:
            raise UserError(
                f"vLLM cannot compute with trained {', '.join(sorted(refused))} of {self.canary.base.name}, as adapters or merged; "
                "serve it with --sampler local"
            )
        return True

    # Write and load

    async def _load_once(self, instance: Instance, key: str, adapter: Adapter) -> str:
        """Return the name of an adapter that is on the server now."""
        return await once(instance.adapters, key, partial(self._load, instance, key, adapter))

    async def _load(self, instance: Instance, key: str, adapter: Adapter) -> str:
        began = time.monotonic()
        path = await once(self.folders, key, partial(asyncio.to_thread, self.files.write, adapter))
        # Another name for every instance, because a server that we did not start may have the adapter of a former one. The server compares
        # what it has loaded with the identity at the end.
        name = f"{self.files.root.name}-{instance.number}-{path.name}-{await asyncio.to_thread(self.files.identity, adapter)}"
        written = time.monotonic()
        async with instance.sleep_mode.kept_awake():
            loading = time.monotonic()
            await instance.connection.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
            loaded = time.monotonic()
            checked = await _has_compared(instance, name)
            if not checked:
                await self._unload(instance, name)
        if not checked:
            raise TinsmithError(
                f"the vLLM server at {instance.connection.url} does not compare adapters with the trainer's; start it with "
                "--worker-extension-cls tinsmith.sampling.inside_vllm.worker.WorkerExtension of this version of Tinsmith"
            )
        log.info(
            "adapter %s is on the vLLM server at %s: %.0f ms to write it, %.0f to load it",
            key,
            instance.connection.url,
            1000 * (written - began),
            1000 * (loaded - loading),
        )
        return name

    async def _take_off(self, instance: Instance, name: str) -> None:
        async with instance.sleep_mode.kept_awake():
            await self._unload(instance, name)

    async def _unload(self, instance: Instance, name: str) -> None:
        await instance.connection.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _transfer(self, instance: Instance, weights: Weights | None) -> None:
        """Replace the weights that the server computes with; an adapter is merged into the base's. Nothing runs there meanwhile.

        After a failure the server holds nothing that could be sampled from, but the next attempt can begin.
        """
        tensors = await asyncio.to_thread(self.files.tensors, weights)
        post = instance.connection.post
        async with instance.sleep_mode.kept_awake():
            transfer = instance.transfer or await self._opened(instance)
            instance.transfer = None
            await post("/pause", mode="wait", clear_cache="false")  # images stay; prefixes are reset below
            try:
                await self._send(instance, transfer, tensors)
            except BaseException:  # it is what is told, whatever becomes of the server now
                for path, body in (("/finish_weight_update", {}), ("/resume", None)):  # there may be nothing to finish
                    with suppress(TinsmithError):
                        await post(path, body)
                raise
            instance.transfer = transfer
            await post("/resume")
        instance.checks.clear()  # adapters too are computed over what has just come

    async def _opened(self, instance: Instance) -> Transfer:
        transfer = new_transfer(instance.transfer_kind, self.files.root, self.device, instance.ranks, self.longest_broadcast_s)
        await transfer.open(instance.connection)
        return transfer

    async def _send(self, instance: Instance, transfer: Transfer, tensors: Tensors) -> None:
        post, label = instance.connection.post, f"{_LABEL}{self.files.root.name}-{next(self._transfers)}"
        await post("/start_weight_update")
        await transfer.send(instance.connection, tensors, await asyncio.to_thread(identity, tensors.items()))
        await post("/finish_weight_update", {"weight_version": label})
        await post("/reset_prefix_cache", reset_running_requests="true")
        if instance.label is not None:
            instance.label = label

    # Verify

    def _compared(self, instance: Instance, published: PublishedWeights, name: str | None) -> "asyncio.Future[None]":
        """Compare the canary, once for all requests for these weights, which stay on the server until that has ended."""
        is_new = published.ref.key not in instance.checks
        compared = once(instance.checks, published.ref.key, partial(self._compare, instance, published, name))
        if is_new:
            leave = instance.weights_lock.keep()
            instance.checks[published.ref.key].add_done_callback(lambda _: leave())
        return compared

    async def _compare(self, instance: Instance, published: PublishedWeights, name: str | None) -> None:
        reply = await score(instance, self.canary.rendered, scoring_params(0), name)
        try:
            self.canary.compare(reply["prompt_logprobs"], published.canary, str(published))
        except TinsmithError:
            if instance.adapters.pop(published.ref.key, None) is not None and name is not None:
                await self._take_off(instance, name)
            raise

    async def try_probes(self, instance: Instance) -> None:
        """Find out once whether an instance can be sampled from, and to which kinds of layers it applies adapters.

        Raises as `Connection.post`, and TinsmithError if it differs from the trainer with the base's weights.
        """
        await once(instance.facts, "probes", partial(self._probe, instance))

    async def _probe(self, instance: Instance) -> None:
        await self._learn_about(instance)
        if instance.refusal is not None:
            log.error("the vLLM server at %s is not sampled from: %s", instance.connection.url, instance.refusal)
            return
        async with instance.weights_lock.holding(BASE, partial(self._transfer, instance, None)):
            if self.probes:  # weights that are not the trainer's are left alone: they may be somebody else's
                reply = await score(instance, self.canary.rendered, scoring_params(0), None)
                self.canary.compare(reply["prompt_logprobs"], self.probes[0].bare, "the base weights")
            left_out = [probe for probe in self.probes if not await self._shows(instance, probe, self._as_adapter(instance, probe))]
        instance.merged_kinds = frozenset(probe.kind for probe in left_out)
        for probe in left_out:
            merged = instance.weights_lock.holding(f"probe/{probe.kind}", partial(self._transfer, instance, probe.adapter))
            if not await self._shows(instance, probe, merged):
                instance.refused_kinds |= {probe.kind}
        if left_out:
            log.warning(
                "the vLLM server at %s applies no adapters to %s; what trains these is merged into the base's weights, or refused with %s",
                instance.connection.url,
                ", ".join(sorted(instance.merged_kinds)),
                ", ".join(sorted(instance.refused_kinds)) or "none",
            )

    async def _shows(self, instance: Instance, probe: AdapterProbe, loaded: AbstractAsyncContextManager[str | None]) -> bool:
        """Return whether a server computes what the trainer does while it has a probe `loaded`. One that refuses the probe does not."""
        try:
            async with loaded as name:
                reply = await score(instance, self.canary.rendered, scoring_params(0), name)
        except (RefusedError, ServerFailedError, UserError) as error:
            if not await instance.answers():
                raise
            log.info("the vLLM server at %s refuses a probe of %s: %s", instance.connection.url, probe.kind, error)
            return False
        return probe.is_shown_by(self.canary.difference(reply["prompt_logprobs"], probe.expected))

    @asynccontextmanager
    async def _as_adapter(self, instance: Instance, probe: AdapterProbe) -> AsyncIterator[str]:
        key = f"probe/{probe.kind}"
        name = await self._load_once(instance, key, probe.adapter)
        yield name
        await self._take_off(instance, name)
        del instance.adapters[key]

    async def _learn_about(self, instance: Instance) -> None:
        """Ask a server once what it calls its full weights, which vLLM 0.26 cannot say, and whether it can be sampled from."""
        await once(instance.facts, "version", partial(self._ask_version, instance))

    async def _ask_version(self, instance: Instance) -> None:
        if not instance.started_by_us and has_delta_nets(self.canary.base):
            instance.refusal = refusal(self.canary.base, (await instance.connection.get("/version"))["version"], self.served_on)
        with suppress(RefusedError):
            instance.label = (await instance.connection.get("/weight_info"))["weight_version"]
        if not instance.started_by_us and (instance.label is None or instance.label.startswith(_LABEL)):
            # A process before this one may have left its weights there.
            instance.weights_lock.weights = UNKNOWN


async def _has_compared(instance: Instance, name: str) -> bool:
    """Return whether all workers of a server have compared an adapter (`inside_vllm/worker.py`)."""
    with suppress(RefusedError, ServerFailedError):  # it has no such method
        reply = await instance.connection.post("/collective_rpc", {"method": "tinsmith_checked_adapter", "args": [name]})
        return all(result["checked"] for result in reply["results"])
    return False
