"""A decoder whose layers are not all in the memory of its device: each comes when it is computed, forward and backward.

Where they come from is for a `LayerSource` to say: the host's memory (`models/host_layers.py`), or parts that several workers keep
(`training/sharded_layers.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tinsmith.models.decoder import Decoder, Deepstack, Layer, Pass
from tinsmith.models.packed_lora import Adapters, SegmentAdapters
from tinsmith.models.pass_plan import PassPlan


class LayerSource(Protocol):
    """Layers that come when they are needed: forward from the first to the last, then back to the first."""

    @property
    def count(self) -> int:
        """Number of layers."""
        ...

    def layer(self, index: int) -> Layer:
        """A layer that can be computed until the next one is asked for."""
        ...

    def layer_to_train(self, index: int) -> tuple[Layer, tuple[Tensor, ...]]:
        """Return a layer, and its tensors whose gradients `give` wants: none of a frozen layer."""
        ...

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of what `layer_to_train` has returned last."""
        ...


class OwnWeights:
    """Layers of a source with other parameters in the place of theirs, by their names inside the language model. Not to train them."""

    def __init__(self, source: LayerSource, parameters: Mapping[str, Tensor]) -> None:
        self.source = source
        self.parameters = parameters

    @property
    def count(self) -> int:
        return self.source.count

    def layer(self, index: int) -> Layer:
        return self.source.layer(index).with_weights(self.parameters)

    def layer_to_train(self, index: int) -> tuple[Layer, tuple[Tensor, ...]]:
        raise TypeError("the gradients of weights that stand in the place of others would be lost")

    def give(self, gradients: Sequence[Tensor | None]) -> None:
        """Never called: `layer_to_train` returns nothing to train."""


@dataclass(frozen=True, eq=False)
class StreamedDecoder(Decoder):
    """A decoder without `layers` of its own."""

    source: LayerSource
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
        look: Callable[[], None] | None = None,
    ) -> Tensor:
        """Compute `Decoder.forward` and recompute all layers, because none stays. Calls neither `between` nor `look`."""
        shared = Pass(plan, adapters, *self.rope.angles(positions), deepstack)
        leaves = _leaves_by_layer(adapters, self.source.count)
        x = embeddings
        compute: Any = _Layer.apply
        for index, of_layer in enumerate(leaves):
            x = compute(self.source, index, shared, self.anchor, x, *of_layer)
        return self.finish(x, None)

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "StreamedDecoder":
        """Return a decoder with other weights, for passes without a backward. Each layer gets its own when it comes."""
        return StreamedDecoder((), self.last_norm.with_weights(parameters), self.rope, OwnWeights(self.source, parameters))


def _leaves_by_layer(adapters: Adapters, layers: int) -> list[list[Tensor]]:
    """The matrices of all adapters of the pass that belong to each layer, each once: what gradients are taken of."""
    if not isinstance(adapters, SegmentAdapters):
        raise TypeError(f"layers that come one by one take no {type(adapters).__name__}")
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
    def forward(ctx: Any, source: LayerSource, index: int, shared: Pass, anchor: Tensor | None, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.source, ctx.index, ctx.shared, ctx.leaves = source, index, shared, leaves
        ctx.save_for_backward(x)
        return source.layer(index).total(x, shared)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needed: Sequence[bool] = ctx.needs_input_grad[4:]
        with torch.enable_grad():
            inputs = (x.detach().requires_grad_(needed[0]), *ctx.leaves)
            layer, own = ctx.source.layer_to_train(ctx.index)
            out = layer.total(inputs[0], ctx.shared)
            wanted = [tensor for tensor, wants in zip(inputs, needed, strict=True) if wants]
            found = torch.autograd.grad(out, (*wanted, *own), grads)
        ctx.source.give(found[len(wanted) :])
        of_inputs = iter(found)
        return None, None, None, None, *(next(of_inputs) if wants else None for wants in needed)
