"""Probes: adapters that each change one kind of layer as much as its own weights do, tried once on each new instance of a server.

If a server leaves out a part of an adapter, that is no error to vLLM, and changes less than rounding while the adapter has learned little.
Where a server differs from the trainer with a probe, adapters that reach such layers are sent there merged into the base's weights.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from tinsmith.errors import UserError
from tinsmith.models.layout import GROUPS, HEAD_WEIGHT, LM_HEAD
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Instance
from tinsmith.sampling.vllm.launch import has_delta_nets, refusal
from tinsmith.sampling.vllm.loader import LABEL, WeightLoader, once
from tinsmith.sampling.vllm.protocol import RefusedError, ServerFailedError
from tinsmith.sampling.vllm.verify import Canary, Expectation
from tinsmith.sampling.vllm.weights import WeightFiles

log = logging.getLogger(__name__)

_SIZE = 2.0
"""Size of a probe's change of a weight, as a multiple of the weight's (Frobenius norms)."""
_APPLIED = 0.5
"""A probe is applied if the log-probabilities are off by less than this part of what it changes them by."""


@dataclass(frozen=True, eq=False)
class AdapterProbe:
    """An adapter of rank 1 that changes the layers of one kind only."""

    kind: str
    """Such as `linear_attn.in_proj_qkv.q`: the names of its targets without the number of the layer."""
    adapter: Adapter
    expected: Expectation
    """The trainer's results with it."""
    bare: Expectation
    """The same with the base's weights alone."""

    @property
    def change(self) -> float:
        return float(np.abs(self.expected.logprobs - self.bare.logprobs).mean())

    @property
    def allowed(self) -> float:
        """Largest mean difference from the expected, in nats, of a server that applies it."""
        return max(_APPLIED * self.change, self.expected.limit)

    def is_shown_by(self, difference: float) -> bool:
        """Return whether a server that differs by so much on average applies it. What is not finite shows nothing."""
        return self.expected.is_finite and self.bare.is_finite and difference <= self.allowed


def kind_of(target: str) -> str:
    """Return the kind of a target of LoRA: its name without the number of its layer."""
    parts = [part for part in target.split(".") if not part.isdecimal()]
    return ".".join(parts[1:] or parts)


@torch.no_grad()
def make_probes(canary: Canary, files: WeightFiles) -> list[AdapterProbe]:
    """Make a probe for each kind of layer that LoRA can train, in the trainer's thread."""
    bare = canary.expected(None)
    kinds: dict[str, list[str]] = {}
    for name in canary.base.layout.targets:
        kinds.setdefault(kind_of(name), []).append(name)
    probes = []
    for kind, names in kinds.items():
        adapter = _adapter(files, names)
        probes.append(AdapterProbe(kind, adapter, canary.expected(adapter), bare))
    return probes


def _adapter(files: WeightFiles, names: list[str]) -> Adapter:
    """Make an adapter that changes these targets. It has the others of their group too, as every trained adapter."""
    base = files.base
    group = base.layout.targets[names[0]].group
    shape = LoraShape(1, seed=0, **{f"train_{each}": each == group for each in GROUPS})
    adapter = new_adapter(shape, base.layout, base.device, base.dtype)
    generator = torch.Generator().manual_seed(0)
    for name in names:
        a, b = adapter.masters[name]
        b.copy_(torch.randn(b.shape, generator=generator))
        b.mul_(_SIZE * torch.linalg.vector_norm(files.base_weight(name), dtype=torch.float32) / (adapter.scale * a.norm() * b.norm()))
    adapter.refresh()
    return adapter


class TryOut:
    """Finds out for each instance once whether it may be sampled from, and to which kinds of layers it applies adapters."""

    def __init__(self, canary: Canary, loader: WeightLoader, served_on: torch.device, probes: Sequence[AdapterProbe]) -> None:
        """Servers compute on devices like `served_on`."""
        self.canary = canary
        self.loader = loader
        self.served_on = served_on
        self.probes = probes

    async def try_out(self, instance: Instance) -> None:
        """Ask an instance which probes it applies, once. Nothing is known if that has failed, and the next call asks again.

        Raises as `Connection.post`, and TinsmithError if it differs from the trainer with the base's weights.
        """
        await once(instance.facts, "probes", partial(self._probe, instance))

    async def learn_about(self, instance: Instance) -> None:
        """Ask a server once what it calls its full weights, which vLLM 0.26 cannot say, and whether it can be sampled from."""
        await once(instance.facts, "version", partial(self._ask_version, instance))

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

    async def _probe(self, instance: Instance) -> None:
        await self.learn_about(instance)
        if instance.refusal is not None:
            log.error("the vLLM server at %s is not sampled from: %s", instance.connection.url, instance.refusal)
            return
        async with instance.weights_lock.holding(BASE, partial(self.loader.replace, instance, None)):
            if self.probes:  # weights that are not the trainer's are left alone: they may be somebody else's
                self.canary.compare(await self.canary.scored_by(instance, None), self.probes[0].bare, "the base weights")
            left_out = [probe for probe in self.probes if not await self._shows(instance, probe, self._as_adapter(instance, probe))]
        instance.merged_kinds = frozenset(probe.kind for probe in left_out)
        for probe in left_out:
            merged = instance.weights_lock.holding(f"probe/{probe.kind}", partial(self.loader.replace, instance, probe.adapter))
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
                scores = await self.canary.scored_by(instance, name)
        except (RefusedError, ServerFailedError, UserError) as error:
            if not await instance.answers():
                raise
            log.info("the vLLM server at %s refuses a probe of %s: %s", instance.connection.url, probe.kind, error)
            return False
        return probe.is_shown_by(self.canary.difference(scores, probe.expected))

    @asynccontextmanager
    async def _as_adapter(self, instance: Instance, probe: AdapterProbe) -> AsyncIterator[str]:
        key = f"probe/{probe.kind}"
        name = await self.loader.load(instance, key, probe.adapter)
        yield name
        await self.loader.take_off(instance, name)
        del instance.adapters[key]

    async def _ask_version(self, instance: Instance) -> None:
        if not instance.started_by_us and has_delta_nets(self.canary.base):
            instance.refusal = refusal(self.canary.base, (await instance.connection.get("/version"))["version"], self.served_on)
        with suppress(RefusedError):
            instance.label = (await instance.connection.get("/weight_info"))["weight_version"]
        if not instance.started_by_us and (instance.label is None or instance.label.startswith(LABEL)):
            # A process before this one may have left its weights there.
            instance.weights_lock.weights = UNKNOWN
