"""Keeping less of a pass for its backward: layers that are computed again, and inputs of layers that wait in host memory.

A layer that is recomputed keeps its input alone. The backward computes the layer a second time, which costs about a quarter of the pass
when all layers do it, and gives the same bits. The first layers are chosen: the backward comes to them last, when what the others kept is
free again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tinsmith.models.full import FullWeights
from tinsmith.models.lora import ActiveSegments

HOST_PIECE = 2**26
"""Bytes of host memory that an input of a layer takes at a time."""


def recomputed(layer: Callable[..., Any], x: Tensor, **keywords: Any) -> Any:
    """Return `layer(x, **keywords)`, and keep only x for the backward.

    `layer` is called a second time during the backward, and must find there all that it reads besides its arguments.
    """
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, **keywords)


class RecomputedLayers:
    """The layers of a language model that transformers calls, of which a pass can have the first ones recomputed."""

    def __init__(self, language_model: nn.Module, active: ActiveSegments) -> None:
        self.active = active
        self.prefix, self.layers = layers_of(language_model)
        self.count = 0
        self.full: FullWeights | None = None
        for index, layer in enumerate(self.layers):
            own: Any = layer
            own.forward = partial(self._forward, index, own.forward)

    @contextmanager
    def during(self, count: int, full: FullWeights | None) -> Iterator[None]:
        """Recompute the first `count` layers of the passes that the body begins, all with the weights `full` if there are any."""
        self.count, self.full = count, full
        try:
            yield
        finally:
            self.count, self.full = 0, None

    def _forward(self, index: int, forward: Callable[..., Any], hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Replace a layer's own `forward`."""
        if index >= self.count or not torch.is_grad_enabled():
            return forward(hidden, *arguments, **keywords)
        segments, full, layer = self.active.segments, self.full, self.layers[index]

        def compute(x: Tensor, **keywords: Any) -> Any:
            count, self.count = self.count, 0  # so that this method calls the layer
            try:
                with self.active.during(segments):  # the backward comes when the pass has cleared its segments and weights
                    if full is None:
                        return layer(x, *arguments, **keywords)
                    return full.call(layer, f"{self.prefix}.{index}.", x, *arguments, **keywords)
            finally:
                self.count = count

        return recomputed(compute, hidden, **keywords)


def layers_of(language_model: Any) -> tuple[str, Sequence[nn.Module]]:
    """The decoder layers of a transformers language model and the name of their list; none if it has no list of that length."""
    for name, module in language_model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == language_model.config.num_hidden_layers:
            return name, list(module)
    return "", []


@dataclass(frozen=True, eq=False)
class _InHostMemory:
    """A tensor of a device that waits in host memory."""

    device: torch.device
    shape: torch.Size
    pieces: list[Tensor]
    """Its numbers in order. PyTorch takes pinned memory in powers of two: in one piece a tensor might take twice its size."""

    @classmethod
    def of(cls, tensor: Tensor) -> "_InHostMemory":
        """A copy that the host does not wait for."""
        pinned = tensor.device.type == "cuda"
        there = tensor.reshape(-1).split(HOST_PIECE // tensor.dtype.itemsize)
        here = [torch.empty(piece.shape, dtype=piece.dtype, pin_memory=pinned).copy_(piece, non_blocking=True) for piece in there]
        return cls(tensor.device, tensor.shape, here)

    def back(self) -> Tensor:
        """The tensor on its device again, as a copy that the host does not wait for."""
        numbers = torch.empty(self.shape, dtype=self.pieces[0].dtype, device=self.device)
        for place, piece in zip(numbers.view(-1).split(len(self.pieces[0])), self.pieces, strict=True):
            place.copy_(piece, non_blocking=True)
        return numbers


@contextmanager
def kept_in_host_memory(tokens: int) -> Iterator[None]:
    """Let what the body keeps of a row of `tokens` tokens wait in host memory, and come back when the backward needs it.

    Meant for passes that recompute all their layers: what they keep is the inputs of the layers. The copies are part of the device's
    stream, so nobody waits for them.
    """

    def to_host(tensor: Tensor) -> Tensor | _InHostMemory:
        if tensor.ndim < 2 or tokens not in tensor.shape[:2]:  # a weight, or something small
            return tensor
        return _InHostMemory.of(tensor)

    with saved_tensors_hooks(to_host, lambda kept: kept.back() if isinstance(kept, _InHostMemory) else kept):
        yield
