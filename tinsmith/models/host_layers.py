"""Layers of a base model that stay in the host's memory, where the pages of their files are mapped, until workers divide them.

A base model may be larger than the device of one worker. So nothing but one layer at a time is on the device before each worker keeps its
part: our own decoder has each layer copied there when it computes it, and so have transformers' modules, with which the self-check compares
it. Of files in the precision that is served no copy is made in the host's memory, and several workers share the pages.
"""

from typing import Any

import torch
from torch import Tensor, nn

from tinsmith.models.decoder import DecoderParts, Layer, read_parts
from tinsmith.models.joined_linear import join_on
from tinsmith.models.layer_tensors import with_tensors
from tinsmith.models.layout import LM_HEAD, Layout
from tinsmith.models.streamed_decoder import StreamedDecoder


def move_all_but_layers(network: nn.Module, language_model: Any, device: torch.device) -> None:
    """Bring everything but the layers of the language model to a device; transformers' modules fetch each layer when they call it."""
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
        """Before the module computes."""
        self.at_home = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
        for tensor, data in self.at_home:
            tensor.data = data.to(self.device)

    def end(self, module: nn.Module, inputs: object, output: object) -> None:
        """Return the tensors to the host's memory when the module has computed."""
        for tensor, data in self.at_home:
            tensor.data = data
        self.at_home = []


class HostLayers:
    """The layers for our own decoder, of which one is on the device."""

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
        joined = {own.name: join_on(self.device, linears, own) for own, linears in self.linears if own.name.startswith(prefix)}
        layer: Layer = self.builds[index](joined)
        return with_tensors(layer, lambda tensor: tensor.detach().to(self.device))


def read_host_decoder(model_type: str, language_model: nn.Module, layout: Layout, device: torch.device) -> StreamedDecoder | None:
    """Read a decoder whose layers stay in the host's memory, where nothing is joined. Returns None as `read_decoder` does."""
    parts = read_parts(model_type, language_model, layout)
    if parts is None:
        return None
    return StreamedDecoder((), parts.last_norm, parts.rope, HostLayers(parts, language_model, layout, device))
