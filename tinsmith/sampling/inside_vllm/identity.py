"""The identity of a set of weights: a number that trainer and vLLM each compute from names and bits of the tensors.

It is the same on every device, for every order of the tensors, and for any zero padding around them. Sets that differ in one value always
have different numbers; sets that differ in more almost always do. It guards against mistakes, not against attackers.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_AT_ONCE = {"cpu": 2**16, "cuda": 2**24}
"""Elements that are widened to 64 bits at one time. On a CPU they stay in its cache, which makes this ten times as fast."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Odd numbers with bits everywhere, for mixing."""


class Identity:
    """The identity of tensors of one or two dimensions, on one device, added one after the other."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Only its sum is kept."""
        self._sums.append(_key(name) * _sum(tensor))

    def __str__(self) -> str:
        """16 hexadecimal digits."""
        return f"{int(torch.stack(self._sums).sum()) & (2**64 - 1):016x}"


def identity(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The identity of tensors by name, as 16 hexadecimal digits."""
    whole = Identity()
    for name, tensor in tensors:
        whole.add(name, tensor)
    return str(whole)


def _sum(tensor: Tensor) -> Tensor:
    """The sum, modulo 2^64, of each element's bits times a number for its row and one for its column: zero padding changes nothing."""
    matrix = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).reshape(-1, tensor.shape[-1])
    rows, columns = (_odd(size, tensor.device) for size in matrix.shape)
    step = max(1, _AT_ONCE[tensor.device.type] // matrix.shape[1])
    parts = [
        ((matrix[start : start + step].to(torch.int64) * columns).sum(1) * rows[start : start + step]).sum()
        for start in range(0, len(matrix), step)
    ]
    return torch.stack(parts).sum()


def _odd(count: int, device: torch.device) -> Tensor:
    """[count] odd numbers without a pattern, the same for every count and device."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in _FACTORS:
        numbers = numbers * factor
        numbers = numbers ^ (numbers >> 29)
    return numbers | 1


def _key(name: str) -> int:
    """An odd number for a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) | 1
