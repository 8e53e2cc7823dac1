"""A decoder whose layers are divided over the workers (`--shard weights`): a layer is there while it is computed, forward and backward.

What is divided is the weights of all layers: of a base model, which LoRA leaves as they are, or of a model with weights of its own
(`divided_weights.py`). Embedding, LM head, last norm, vision tower and adapters are whole on each worker.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tinsmith.distributed.process_group import ProcessGroup
from tinsmith.errors import ConfigError
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import Decoder, Deepstack, Pass
from tinsmith.models.machine import size_text
from tinsmith.models.packed_lora import Adapters, SegmentAdapters
from tinsmith.models.pass_plan import PassPlan
from tinsmith.training.divided_layers import DividedLayers, divide_layers

log = logging.getLogger(__name__)


def require_divisible(base: BaseModel) -> None:
    """Raise ConfigError if the layers of the model cannot be divided."""
    if base.decoder is None:
        raise ConfigError(
            f"{base.name} ({base.family.model_type}) cannot be served with --shard weights, which only models take whose layers Tinsmith's "
            "own decoder computes; use --shard none"
        )
    if base.deterministic:
        raise ConfigError(f"{base.name}: --shard weights and --deterministic do not work together; leave one out")


def divide(base: BaseModel, group: ProcessGroup) -> None:
    """Divide the layers of a base model over all workers: what this one does not keep of them is freed."""
    require_divisible(base)
    decoder = base.decoder
    assert decoder is not None
    layers = list(decoder.layers)
    base.decoder = decoder = replace(decoder, layers=())
    divided = divide_layers(layers, group, lambda index: _without_memory(base, index))
    base.decoder = DividedDecoder(tuple(divided.templates), decoder.last_norm, decoder.rope, divided)
    if base.device.type == "cuda":
        torch.cuda.empty_cache()
    log.info(
        "%s: its %d layers are divided over %d workers (--shard weights): this one keeps %s of %s, and %s of buffers",
        *(base.name, len(divided.parts), group.count),
        *map(size_text, (divided.nbytes, divided.whole_bytes, divided.buffer_bytes)),
    )


def _without_memory(base: BaseModel, index: int) -> None:
    """Let go of what transformers' modules hold of a layer."""
    base.language_model.get_submodule(f"layers.{index}").to("meta")


@dataclass(frozen=True, eq=False)
class DividedDecoder(Decoder):
    """A decoder whose `layers` have no memory. It computes within passes of all workers (`DividedLayers.begin` and `finish`)."""

    divided: DividedLayers
    anchor: Tensor | None = None
    """A tensor that requires a gradient, for layers that are trained: so the backward comes to each of them, whatever else is trained."""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        plan: PassPlan,
        adapters: Adapters,
        deepstack: Deepstack | None = None,
        recompute: int = 0,
        between: Callable[[], None] | None = None,
    ) -> Tensor:
        """As `Decoder.forward`. All layers are recomputed, because none of them stays; `between` is not called."""
        shared = Pass(plan, adapters, *self.rope.angles(positions), deepstack)
        leaves = _leaves_by_layer(adapters, len(self.divided.parts))
        x = embeddings
        compute: Any = _Layer.apply
        for index, of_layer in enumerate(leaves):
            x = compute(self.divided, index, shared, self.anchor, x, *of_layer)
        return self.finish(x, None)


def _leaves_by_layer(adapters: Adapters, layers: int) -> list[list[Tensor]]:
    """The matrices of all adapters of the pass that belong to each layer, each once: what gradients are taken of."""
    if not isinstance(adapters, SegmentAdapters):
        raise TypeError(f"layers that are divided over the workers take no {type(adapters).__name__}")
    found: list[list[Tensor]] = [[] for _ in range(layers)]
    owners = {id(segment.adapter): segment.adapter for segment in adapters.segments if segment.adapter is not None}
    for adapter in owners.values():
        for name, pair in adapter.working.items():
            place = name.split(".")
            if place[0] == "layers":
                found[int(place[1])] += pair
    return found


class _Layer(torch.autograd.Function):
    """A layer that keeps its input alone. The weights that computed it are gone when its backward comes, and are put together again."""

    @staticmethod
    def forward(ctx: Any, divided: DividedLayers, index: int, shared: Pass, anchor: Tensor | None, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.divided, ctx.index, ctx.shared, ctx.leaves = divided, index, shared, leaves
        ctx.save_for_backward(x)
        return divided.layer(index).total(x, shared)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needed: Sequence[bool] = ctx.needs_input_grad[4:]
        with torch.enable_grad():
            inputs = (x.detach().requires_grad_(needed[0]), *ctx.leaves)
            layer, own = ctx.divided.layer_to_train(ctx.index)
            out = layer.total(inputs[0], ctx.shared)
            wanted = [tensor for tensor, wants in zip(inputs, needed, strict=True) if wants]
            found = torch.autograd.grad(out, (*wanted, *own), grads)
        ctx.divided.give(found[len(wanted) :])
        of_inputs = iter(found)
        return None, None, None, None, *(next(of_inputs) if wants else None for wants in needed)
