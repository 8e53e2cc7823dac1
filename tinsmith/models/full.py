"""Full-parameter training ("rank 0"): each model copies the language model's weights; the vision tower stays shared.

A pass computes with the copies in the place of the base's parameters of the same names. In a compact state float32
masters share their upper 16 bits with the bfloat16 working weights, so that both together take 4 bytes a number and not
6. With w the bits of a float32 number and b those of the nearest bfloat16 number, w = b · 2^16 + r, with r from -32,768
to 32,767: r, the rest, fits into an int16. Of two that are equally near, b is the one away from zero. Nothing is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tinsmith.kernels.device import on_device
from tinsmith.models.layout import HEAD_WEIGHT
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape, WeightsRef

if TYPE_CHECKING:
    from tinsmith.models.decoder import Decoder  # which imports this module


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """float32 numbers -> the nearest bfloat16 ones, and what is left, in int16.

    The numbers must be finite, and below 3.38e38.
    """
    bits = wide.contiguous().view(torch.int32)
    rest = ((bits + 0x8000) & 0xFFFF) - 0x8000
    return ((bits - rest) >> 16).to(torch.int16).view(torch.bfloat16), rest.to(torch.int16)


def join(near: Tensor, rest: Tensor) -> Tensor:
    """The inverse of `split`."""
    bits = (near.contiguous().view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)


class SplitMasters(Mapping[str, Tensor]):
    """The masters of full weights by name. Each is put together when it is asked for, and is a copy then."""

    def __init__(self, working: Mapping[str, Tensor], rests: Mapping[str, Tensor]) -> None:
        """`working` in bfloat16 and `rests` in int16, of the same shapes; both change with training.

        Rests may lie in host memory.
        """
        self.working = working
        self.rests = rests

    def __getitem__(self, name: str) -> Tensor:
        near, rest = self.working[name].detach(), self.rests[name]
        if rest.device != near.device:
            torch.cuda.synchronize(near.device)  # the copy of a step to the host may be on its way
        return join(near, rest.to(near.device))

    def __iter__(self) -> Iterator[str]:
        return iter(self.working)

    def __len__(self) -> int:
        return len(self.working)

    @property
    def nbytes(self) -> int:
        """Memory that the rests hold on the device of the working weights, in bytes."""
        pairs = ((rest, self.working[name]) for name, rest in self.rests.items())
        return sum(rest.nbytes for rest, near in pairs if rest.device == near.device)


def split_masters(masters: Mapping[str, Tensor], device: torch.device, rests_on: torch.device) -> SplitMasters:
    """Split masters of any precision and place into trainable working weights on `device` and rests on `rests_on`."""
    working: dict[str, Tensor] = {}
    rests: dict[str, Tensor] = {}
    for name, master in masters.items():
        near, rest = split(master.detach().to(device, torch.float32).contiguous())  # as gradients lie
        working[name] = near.requires_grad_()
        rests[name] = on_device(rest, rests_on)
    return SplitMasters(working, rests)


@dataclass
class FullWeights:
    """Parameters of a language model by their names inside of it, and an untied output projection.

    What is not here is not trained.

    `working` are the copies in `dtype` that passes read, and the same tensors where the masters are of that dtype.
    After `masters` changed, call `refresh`.
    """

    shape: LoraShape
    """Its rank is 0."""
    masters: Mapping[str, Tensor]
    """float32, or `dtype` in frozen copies; `SplitMasters` share their upper bits with the working copies."""
    dtype: torch.dtype
    working: dict[str, Tensor] = field(init=False)
    ref: WeightsRef | None = None
    """The identity of weights that are sampled; None for weights that train."""

    def __post_init__(self) -> None:
        if isinstance(self.masters, SplitMasters):
            self.working = dict(self.masters.working)
        else:
            self.working = {
                name: master.detach().to(self.dtype).requires_grad_() for name, master in self.masters.items()
            }

    def call(self, module: nn.Module, prefix: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the language model, or its part below `prefix`, with these weights for its own."""
        inside = (name for name in self.working if name.startswith(prefix) and name != HEAD_WEIGHT)
        return functional_call(
            module, {name.removeprefix(prefix): self.working[name] for name in inside}, arguments, keywords
        )

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
        return FullWeights(
            self.shape, {name: tensor.detach().clone() for name, tensor in self.working.items()}, self.dtype, ref
        )

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
        copies = [
            leaf for leaf, master in zip(self.leaves(), self.tensors(), strict=True) if leaf.dtype != master.dtype
        ]
        return sum(tensor.nbytes for tensor in (*self.tensors(), *copies))

    @property
    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return sum(leaf.numel() for leaf in self.leaves())


Weights = Adapter | FullWeights
"""The trainable weights of one model, or a frozen copy."""


FullState = Literal["float32", "compact", "compact-host"]
"""State of full-parameter training: float32, compact (`training/compact.py`), or compact with a part in host memory."""


def new_full_weights(shape: LoraShape, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> FullWeights:
    """A copy of the base's `parameters` to train.

    It is contiguous, as gradients are: AdamW on a GPU takes both laid out alike only.
    """
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
    return FullWeights(
        shape, {name: _contiguous_copy(parameter, dtype, device) for name, parameter in parameters.items()}, dtype
    )


def state_device(device: torch.device, state: FullState) -> torch.device:
    """Return the device of moments and rests of masters."""
    return torch.device("cpu") if state == "compact-host" else device
