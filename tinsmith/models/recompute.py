"""Keeping less of a pass for its backward: layers that are computed again, and inputs of layers that wait in host memory.

A layer that is recomputed keeps its input alone. The backward computes the layer a second time, which costs about a quarter of the pass
when all layers do it, and gives the same bits. The first layers are chosen: the backward comes to them last, when what the others kept is
free again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

HOST_PIECE = 2**26
"""Bytes of host memory that an input of a layer takes at a time."""


def recomputed(layer: Callable[..., Any], x: Tensor, **keywords: Any) -> Any:
    """Return `layer(x, **keywords)`, and keep only x for the backward.

    `layer` is called a second time during the backward, and must find there all that it reads besides its arguments.
    """
    return checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False, **keywords)


@dataclass(frozen=True, eq=False)
class _InHostMemory:
    """A tensor that waits in host memory."""

    device: torch.device
    shape: torch.Size
    pieces: list[Tensor]
    """Its numbers. PyTorch takes pinned memory in powers of two: in one piece a tensor might take twice its size."""

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
    """Let what the body keeps of a row of `tokens` tokens wait in host memory until the backward needs it.

    Meant for passes that recompute all layers and keep their inputs. The copies are part of the device's stream: nobody waits for them.
    """

    def to_host(tensor: Tensor) -> Tensor | _InHostMemory:
        if tensor.ndim < 2 or tokens not in tensor.shape[:2]:  # a weight, or something small
            return tensor
        return _InHostMemory.of(tensor)

    with saved_tensors_hooks(to_host, lambda kept: kept.back() if isinstance(kept, _InHostMemory) else kept):
        yield
