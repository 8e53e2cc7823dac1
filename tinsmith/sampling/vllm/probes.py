"""Probes: adapters that each change one kind of layer, by which a server shows what of an adapter it applies.

To vLLM it is no error if it leaves out a part of an adapter, and while an adapter has learned little that changes less than rounding does.
A probe changes its layers as much as their own weights do. Where a server computes something else with it than the trainer, adapters that
reach such layers are sent there merged into the base's weights.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tinsmith.models.layout import GROUPS
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.vllm.canary import Canary, Expectation
from tinsmith.sampling.vllm.weights import WeightFiles

_SIZE = 2.0
"""How large a probe's change of a weight is, measured by the weight (Frobenius norms)."""
_APPLIED = 0.5
"""A probe is applied if the log-probabilities are off by less than this part of what it changes them by."""


@dataclass(frozen=True, eq=False)
class AdapterProbe:
    """An adapter of rank 1 that changes the layers of one kind and no others."""

    kind: str
    """Such as `linear_attn.in_proj_qkv.q`: the names of its targets without the number of the layer."""
    adapter: Adapter
    expected: Expectation
    """What the trainer computes for the canary with it."""
    bare: Expectation
    """The same with the base's weights alone."""

    @property
    def change(self) -> float:
        """How far these are apart on average, in nats."""
        return float(np.abs(self.expected.logprobs - self.bare.logprobs).mean())

    @property
    def allowed(self) -> float:
        """A server applies it if its log-probabilities differ from those expected by no more than this on average, in nats."""
        return max(_APPLIED * self.change, self.expected.limit)

    def is_shown_by(self, difference: float) -> bool:
        """Whether a server whose log-probabilities differ by so much from those expected applies it. What is not finite shows nothing."""
        return self.expected.is_finite and self.bare.is_finite and difference <= self.allowed


def kind_of(target: str) -> str:
    """The kind of a target of LoRA: its name without the number of its layer."""
    parts = [part for part in target.split(".") if not part.isdecimal()]
    return ".".join(parts[1:] or parts)


@torch.no_grad()
def make_probes(canary: Canary, files: WeightFiles) -> list[AdapterProbe]:
    """A probe for each kind of layer that LoRA can train. To be called in the trainer's thread."""
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
    """An adapter that changes these targets. It has the others of their group too, as every adapter that is trained."""
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
