"""A decoder whose layers are not all in the memory of its device: each comes when it is computed, forward and backward.

Where they come from is for a `LayerSource` to say: parts that several workers keep
(`training/parallel/sharded_layers.py`), or, until workers divide a base model that may be larger than one device, the
host's memory. Files in the precision that is served are mapped there, so that several workers share their pages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from tinsmith.models.attention import PassPlan
from tinsmith.models.decoder import Decoder, Deepstack, DeltaBlock, Layer, Norm, Pass
from tinsmith.models.experts import ExpertStack
from tinsmith.models.joined_linear import JoinedLinear, join_on
from tinsmith.models.layout import LM_HEAD, Layout
from tinsmith.models.packed_lora import Adapters, SegmentAdapters
from tinsmith.models.read_decoder import DecoderParts, read_parts

P = TypeVar("P")


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
    """Layers of a source with other parameters, which cannot be trained, in the place of theirs."""

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
    """A tensor that requires a gradient, so that the backward comes to each trained layer, whatever else is trained."""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        plan: PassPlan,
        adapters: Adapters,
        deepstack: Deepstack | None = None,
        recompute: int = 0,
        before_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Compute `Decoder.forward` and recompute all layers, because none stays. Never calls `before_layer`."""
        shared = Pass(plan, adapters, *self.rope.angles(positions), deepstack)
        leaves = _leaves_by_layer(adapters, self.source.count)
        x = embeddings
        compute: Any = _Layer.apply
        for index, of_layer in enumerate(leaves):
            x = compute(self.source, index, shared, self.anchor, x, *of_layer)
        return self.finish(x, None)

    def with_weights(self, parameters: Mapping[str, Tensor]) -> "StreamedDecoder":
        """Return a decoder with other weights, for passes without a backward."""
        return StreamedDecoder(
            (), self.last_norm.with_weights(parameters), self.rope, OwnWeights(self.source, parameters)
        )


def _leaves_by_layer(adapters: Adapters, layers: int) -> list[list[Tensor]]:
    """The matrices of all adapters of the pass that belong to each layer, each once."""
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
    """A layer that keeps its input alone: its weights are gone when its backward comes, and are put together again."""

    @staticmethod
    def forward(
        ctx: Any, source: LayerSource, index: int, shared: Pass, anchor: Tensor | None, x: Tensor, *leaves: Tensor
    ) -> Tensor:
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


# Layers in the host's memory


def move_all_but_layers(network: nn.Module, language_model: Any, device: torch.device) -> None:
    """Move all but the language model's layers to a device; each layer is there only while transformers calls it."""
    layers: nn.ModuleList = language_model.layers
    language_model.layers = nn.ModuleList()
    network.to(device)
    language_model.layers = layers
    for layer in layers:
        visit = _Visit(device)
        layer.register_forward_pre_hook(visit.begin)
        layer.register_forward_hook(visit.end)


class _Visit:
    """The parameters and buffers of a module on the device, while it computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.at_home: list[tuple[Tensor, Tensor]] = []
        """Each tensor and what it holds on the host."""

    def begin(self, module: nn.Module, inputs: object) -> None:
        self.at_home = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
        for tensor, data in self.at_home:
            tensor.data = data.to(self.device)

    def end(self, module: nn.Module, inputs: object, output: object) -> None:
        for tensor, data in self.at_home:
            tensor.data = data
        self.at_home = []


class HostLayers:
    """A source whose layers are in the host's memory; the last one that was asked for is on the device too."""

    def __init__(self, parts: DecoderParts, language_model: nn.Module, layout: Layout, device: torch.device) -> None:
        """Make it before LoRA is attached to the linears of the language model."""
        self.builds = parts.layers
        self.device = device
        self.linears = [
            (projection, [language_model.get_submodule(module) for module in projection.modules])
            for name, projection in layout.projections.items()
            if name != LM_HEAD
        ]
        self.there: tuple[int, Layer] | None = None
        """The layer that is on the device, and its number."""

    @property
    def count(self) -> int:
        return len(self.builds)

    def layer(self, index: int) -> Layer:
        if self.there is None or self.there[0] != index:
            self.there = None
            self.there = index, self._copied(index)
        return self.there[1]

    def layer_to_train(self, index: int) -> tuple[Layer, tuple[Tensor, ...]]:
        return self.layer(index), ()

    def give(self, gradients: object) -> None:
        pass

    def _copied(self, index: int) -> Layer:
        prefix = f"layers.{index}."
        joined = {
            own.name: join_on(self.device, linears, own) for own, linears in self.linears if own.name.startswith(prefix)
        }
        layer: Layer = self.builds[index](joined)
        return with_tensors(layer, lambda tensor: tensor.detach().to(self.device))


def read_host_decoder(
    model_type: str, language_model: nn.Module, layout: Layout, device: torch.device
) -> StreamedDecoder | None:
    """Read a decoder whose layers stay in the host's memory, where nothing is joined.

    Returns None as `read_decoder` does.
    """
    parts = read_parts(model_type, language_model, layout)
    if parts is None:
        return None
    return StreamedDecoder((), parts.last_norm, parts.rope, HostLayers(parts, language_model, layout, device))


# The tensors of a layer, or of a part of one


def with_tensors(part: P, change: Callable[[Tensor], Tensor]) -> P:
    """The same part with `change` applied to each of its tensors in a fixed order.

    Parts are dataclasses and tuples of parts and tensors; everything else stays as it is.
    """
    return cast(P, _changed(part, change))


def tensors_of(part: object) -> list[Tensor]:
    """The tensors of the part, in the order of `with_tensors`."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with_tensors(part, note)
    return found


def parameters_of(part: Any) -> dict[str, Tensor]:
    """The parameters of a part of a base model, by their names inside the language model: what `with_weights` takes.

    A linear that has no bias gets rows of zeros if one that is computed with it has a bias.
    """
    if isinstance(part, JoinedLinear):
        found = {}
        for module, (start, end) in zip(part.projection.modules, part.rows, strict=True):
            found[f"{module}.weight"] = part.weight[start:end]
            if part.bias is not None:
                found[f"{module}.bias"] = part.bias[start:end]
        return found
    if isinstance(part, Norm):
        return {part.name: part.weight}
    if isinstance(part, ExpertStack):
        held = zip(part.names, (part.router, part.gate_up, part.down), strict=True)
        return {name: tensor for name, tensor in held if isinstance(tensor, Tensor)}
    if isinstance(part, DeltaBlock):
        own = dict(zip(part.names, part.parameters, strict=True))
        return own | parameters_of(part.projection) | parameters_of(part.output)
    inside: tuple[Any, ...] = ()
    if isinstance(part, tuple):
        inside = part
    elif is_dataclass(part) and not isinstance(part, type):
        inside = tuple(getattr(part, field.name) for field in fields(part))
    return {name: tensor for each in inside for name, tensor in parameters_of(each).items()}


def _changed(part: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(part, Tensor):
        return change(part)
    if isinstance(part, tuple):
        found = [_changed(each, change) for each in part]
        if all(new is old for new, old in zip(found, part, strict=True)):
            return part
        return type(part)(*found) if hasattr(part, "_fields") else tuple(found)
    if is_dataclass(part) and not isinstance(part, type):
        own = {field.name: getattr(part, field.name) for field in fields(part) if field.init}
        changed = {name: _changed(value, change) for name, value in own.items()}
        return part if all(changed[name] is value for name, value in own.items()) else replace(part, **changed)
    return part
