"""Full-parameter training ("rank 0"): a model with its own copy of the language model's weights; the vision tower stays shared.

A pass computes with them in the place of the base's parameters of the same names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tinsmith.models.layout import HEAD_WEIGHT
from tinsmith.models.lora import Adapter
from tinsmith.models.split_masters import SplitMasters, split_masters
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef

if TYPE_CHECKING:
    from tinsmith.models.decoder import Decoder  # which imports this module


@dataclass
class FullWeights:
    """Parameters of a language model by their names inside of it, and an untied output projection. What is not here is not trained.

    `working` are the copies in `dtype` that passes read, and the same tensors where the masters are of that dtype. After `masters` changed,
    call `refresh`.
    """

    shape: LoraShape
    """Its rank is 0."""
    masters: Mapping[str, Tensor]
    """float32, or of `dtype` where nothing is trained any more; `SplitMasters` share their upper bits with the working copies."""
    dtype: torch.dtype
    working: dict[str, Tensor] = field(init=False)
    ref: WeightsRef | None = None
    """The identity of weights that are sampled; None for weights that train."""

    def __post_init__(self) -> None:
        if isinstance(self.masters, SplitMasters):
            self.working = dict(self.masters.working)
        else:
            self.working = {name: master.detach().to(self.dtype).requires_grad_() for name, master in self.masters.items()}

    def call(self, module: nn.Module, prefix: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the language model, or its part below `prefix`, with these weights for its own."""
        inside = (name for name in self.working if name.startswith(prefix) and name != HEAD_WEIGHT)
        return functional_call(module, {name.removeprefix(prefix): self.working[name] for name in inside}, arguments, keywords)

    def decoder_of(self, own: "Decoder") -> "Decoder":
        """The decoder of a base model, with these weights for its own."""
        return own.with_weights(self.working)

    def refresh(self) -> None:
        """Make the working copies equal to the masters again."""
        if self.dtype != torch.float32 and not isinstance(self.masters, SplitMasters):
            with torch.no_grad():
                torch._foreach_copy_(self.leaves(), self.tensors())

    def snapshot(self, ref: WeightsRef) -> "FullWeights":
        """A frozen copy in `dtype` that later training does not change. `ref` becomes its identity."""
        return FullWeights(self.shape, {name: tensor.detach().clone() for name, tensor in self.working.items()}, self.dtype, ref)

    def tensors(self) -> list[Tensor]:
        """All masters in a fixed order; copies, if they are split."""
        return list(self.masters.values())

    def named_tensors(self) -> Mapping[str, Tensor]:
        """All masters, in the order of `tensors`. Split ones are put together one by one, when they are asked for."""
        return self.masters

    def leaves(self) -> list[Tensor]:
        """All working copies, in the order of `tensors`: what gradients are taken of."""
        return list(self.working.values())

    def compared(self) -> list[Tensor]:
        """Tensors by which two sets of weights are told apart: masters, or the working copies beside split ones."""
        return self.leaves() if isinstance(self.masters, SplitMasters) else self.tensors()

    def buffers(self) -> list[Tensor]:
        """Tensors that an optimizer updates: one buffer of all could not be freed piece by piece."""
        return self.tensors()

    def cut(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Return the same tensors: `buffers` are laid out as `tensors`."""
        return list(buffers)

    def joined(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The inverse of `cut`: the same tensors; None stands for zeros."""
        pairs = zip(tensors, self.leaves(), strict=True)
        return [torch.zeros_like(leaf, requires_grad=False) if tensor is None else tensor for tensor, leaf in pairs]

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        if isinstance(self.masters, SplitMasters):
            return sum(leaf.nbytes for leaf in self.leaves()) + self.masters.nbytes
        copies = [leaf for leaf, master in zip(self.leaves(), self.tensors(), strict=True) if leaf.dtype != master.dtype]
        return sum(tensor.nbytes for tensor in (*self.tensors(), *copies))

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.numel() for leaf in self.leaves())


Weights = Adapter | FullWeights
"""The trainable weights of one model, or a frozen copy."""


MOMENT_BLOCK = 256
"""Moments that share a scale in a compact state."""
FullState = Literal["float32", "compact", "compact-host"]
"""State of full-parameter training: all in float32; compact (`training/compact.py`); or compact with a part in host memory."""


def new_full_weights(shape: LoraShape, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> FullWeights:
    """A copy of the base's `parameters` to train. It is contiguous, as gradients are: AdamW on a GPU takes both laid out alike only."""
    masters = {name: _contiguous_copy(parameter, torch.float32) for name, parameter in parameters.items()}
    return FullWeights(shape, masters, dtype)


def _contiguous_copy(parameter: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    return parameter.detach().to(device or parameter.device, dtype, copy=True, memory_format=torch.contiguous_format)


def new_compact_weights(
    shape: LoraShape, parameters: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device, state: FullState
) -> FullWeights:
    """A copy of `parameters`, the base's or a checkpoint's masters, to train on `device` with a compact state."""
    if dtype == torch.bfloat16:
        return FullWeights(shape, split_masters(parameters, device, state_device(device, state)), dtype)
    return FullWeights(shape, {name: _contiguous_copy(parameter, dtype, device) for name, parameter in parameters.items()}, dtype)


def state_device(device: torch.device, state: FullState) -> torch.device:
    """Return the device of moments and rests of masters."""
    return torch.device("cpu") if state == "compact-host" else device


@dataclass(frozen=True)
class FullBytes:
    """Bytes that full-parameter training takes, without the activations of a pass."""

    weights: int
    """The weights that passes read."""
    masters: int
    """The part of the float32 masters that the weights do not hold."""
    moments: int
    """Moments of AdamW."""
    gradients: int
    """Those that are accumulated."""
    pass_gradients: int
    """Those of one pass, while they are added. The first pass after a step needs none with a compact state."""
    host: int
    """Bytes in host memory."""

    @property
    def device(self) -> int:
        """All of it that lies on the device."""
        return self.weights + self.masters + self.moments + self.gradients + self.pass_gradients


def full_bytes(parameters: int, dtype: torch.dtype, state: FullState) -> FullBytes:
    """Return the bytes that training so many parameters on a base in `dtype` takes at most."""
    size = dtype.itemsize
    if state == "float32":
        return FullBytes(parameters * size, 0 if size == 4 else parameters * 4, parameters * 8, parameters * 4, parameters * size, 0)
    masters, moments = (0 if size == 4 else parameters * 2), 2 * parameters + 2 * 4 * parameters // MOMENT_BLOCK
    if state == "compact":
        return FullBytes(parameters * size, masters, moments, parameters * size, parameters * size, 0)
    return FullBytes(parameters * size, 0, 0, parameters * size, parameters * size, masters + moments)


def sharded_full_bytes(layers: Sequence[int], around: int, dtype: torch.dtype, workers: int) -> FullBytes:
    """Return the bytes of each worker for sharded parameters: of each layer, and `around` the layers.

    The latter, and their gradients of a pass, are whole on each worker, as are those of the layer whose backward is computed.
    """
    size = dtype.itemsize
    part = -(-(sum(layers) + around) // workers)
    masters = 0 if size == 4 else part * 4
    pass_gradients = part * 4 + around * size + max(layers) * (size + 4)
    return FullBytes((part + around) * size, masters, part * 8, part * 4, pass_gradients, 0)


def snapshot_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Memory of a frozen copy of that many parameters."""
    return parameters * dtype.itemsize


def training_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Memory that training that many parameters takes at most, beside the activations of a pass.

    In float32 masters, accumulated gradients and two moments; in `dtype` a pass's gradients, and the working copy unless it is float32.
    """
    working = 0 if dtype == torch.float32 else dtype.itemsize
    return parameters * (4 * 4 + working + dtype.itemsize)
