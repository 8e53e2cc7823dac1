"""Full-parameter training ("rank 0"): a model with its own copy of the language model's weights.

The base keeps its own, and so does every other model: a pass over such weights computes with them in the place of the base's parameters of
the same names. The vision tower stays frozen and shared. Masters are float32 on every device; passes compute in the base's dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tinsmith.models.layout import HEAD_WEIGHT
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef


@dataclass
class FullWeights:
    """Parameters of a language model by the names that transformers gives them inside of it, and an untied output projection.

    A parameter that is not here is not trained: the base's is used. `masters` are float32, or of `dtype` where nothing is trained any
    more; `working` are the copies in `dtype` that passes read, and the same tensors where the masters are of that dtype. After `masters`
    changed, call `refresh`.
    """

    shape: LoraShape
    """Its rank is 0."""
    masters: dict[str, Tensor]
    dtype: torch.dtype
    working: dict[str, Tensor] = field(init=False)
    ref: WeightsRef | None = None
    """The identity of weights that are sampled from. None for weights that train, because training changes them."""

    def __post_init__(self) -> None:
        self.working = {name: master.detach().to(self.dtype).requires_grad_() for name, master in self.masters.items()}

    def call(self, module: nn.Module, prefix: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the language model, or the part of it whose parameters' names start with `prefix`, with these weights for its own."""
        inside = (name for name in self.working if name.startswith(prefix) and name != HEAD_WEIGHT)
        return functional_call(module, {name.removeprefix(prefix): self.working[name] for name in inside}, arguments, keywords)

    def refresh(self) -> None:
        """Make the working copies equal to the masters again."""
        if self.dtype != torch.float32:
            with torch.no_grad():
                torch._foreach_copy_(self.leaves(), self.tensors())

    def snapshot(self, ref: WeightsRef) -> "FullWeights":
        """A frozen copy that later training does not change, in the precision that sampling reads. `ref` becomes its identity."""
        return FullWeights(self.shape, {name: tensor.detach().clone() for name, tensor in self.working.items()}, self.dtype, ref)

    def tensors(self) -> list[Tensor]:
        """All masters in a fixed order."""
        return list(self.masters.values())

    def named_tensors(self) -> dict[str, Tensor]:
        """All masters by name, in the order of `tensors`."""
        return dict(self.masters)

    def leaves(self) -> list[Tensor]:
        """All working copies, in the order of `tensors`: what gradients are taken of."""
        return list(self.working.values())

    def buffers(self) -> list[Tensor]:
        """What an optimizer updates: each master alone, because a buffer for all could not be freed or mapped piece by piece."""
        return self.tensors()

    def cut(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """What is laid out like `buffers`, such as gradients, in the order and shapes of `tensors`: as it is."""
        return list(buffers)

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        copies = [leaf for leaf, master in zip(self.leaves(), self.tensors(), strict=True) if leaf.dtype != master.dtype]
        return sum(tensor.nbytes for tensor in (*self.tensors(), *copies))

    @property
    def parameter_count(self) -> int:
        """How many numbers are trained."""
        return sum(tensor.numel() for tensor in self.tensors())


Weights = Adapter | FullWeights
"""What one model trains, or a frozen copy of it: a LoRA adapter, or all the parameters."""


def new_full_weights(shape: LoraShape, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> FullWeights:
    """A copy of the base's `parameters` to train."""
    masters = {name: parameter.detach().to(torch.float32, copy=True) for name, parameter in parameters.items()}
    return FullWeights(shape, masters, dtype)


def snapshot_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Memory of a frozen copy of that many parameters."""
    return parameters * dtype.itemsize


def training_bytes(parameters: int, dtype: torch.dtype) -> int:
    """Memory that training that many parameters takes at most, beside the activations of a pass.

    In float32: masters, accumulated gradients and Adam's two moments. In `dtype`: the working copy, unless it is float32 too, and the
    gradients of one pass.
    """
    working = 0 if dtype == torch.float32 else dtype.itemsize
    return parameters * (4 * 4 + working + dtype.itemsize)
