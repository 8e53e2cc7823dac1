"""float32 masters that share their upper 16 bits with the bfloat16 working weights, so that both together take 4 bytes a number and not 6.

With w the bits of a float32 number and b those of the bfloat16 number next to it, w = b · 2^16 + r, with r from -32,768 to 32,767: r, the
rest, fits into an int16. Of two that are equally near, b is the one away from zero. Nothing is lost.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def split(wide: Tensor) -> tuple[Tensor, Tensor]:
    """float32 numbers -> the nearest bfloat16 ones, and what is left, in int16. The numbers must be finite, and below 3.38e38."""
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
        """`working` in bfloat16 and `rests` in int16, of the same shapes; both change with training. Rests may lie in host memory."""
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
    """Masters of any precision and place, taken apart: working weights that can be trained on `device`, and rests on `rests_on`."""
    working: dict[str, Tensor] = {}
    rests: dict[str, Tensor] = {}
    for name, master in masters.items():
        near, rest = split(master.detach().to(device, torch.float32).contiguous())  # as gradients lie
        working[name] = near.requires_grad_()
        rests[name] = placed(rest, rests_on)
    return SplitMasters(working, rests)


def placed(tensor: Tensor, where: torch.device) -> Tensor:
    """The tensor there; in host memory where a GPU can read and write it beside its work."""
    if where == tensor.device or where.type != "cpu":
        return tensor.to(where)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)
