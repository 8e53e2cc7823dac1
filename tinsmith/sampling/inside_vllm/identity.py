"""The identity of a set of weights: a number that trainer and vLLM each compute from names and bits of the tensors.

It is the same on every device, for every order of the tensors, and for any zero padding. Sets that differ in one value
always have different numbers; sets that differ in more almost always do. It guards against mistakes, not against
attackers.
"""

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_AT_ONCE = {"cpu": 2**16, "cuda": 2**24}
"""Elements that are widened to 64 bits at one time. On a CPU they stay in its cache, which is ten times as fast."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTORS = (-7046029254386353131, -4658895280553007687)


class Identity:
    """The identity of tensors of one or two dimensions on one device, added one after the other.

    Hundreds of small tensors are added up by shape: a GPU takes longer to launch a kernel than to go through one.
    """

    def __init__(self) -> None:
        self._waiting: dict[torch.Size, list[tuple[int, Tensor]]] = {}
        """Small tensors as integers [rows, columns], by shape, with the numbers of their names."""
        self._sums: list[tuple[list[int], Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which must not change before the identity is asked for."""
        matrix = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).reshape(-1, tensor.shape[-1])
        alike = self._waiting.setdefault(matrix.shape, [])
        alike.append((_key(name), matrix))
        if (len(alike) + 1) * matrix.numel() > _AT_ONCE[matrix.device.type]:
            self._add_up(alike)

    def __str__(self) -> str:
        for alike in self._waiting.values():
            self._add_up(alike)
        keys = [key for names, _ in self._sums for key in names]
        sums = torch.cat([found for _, found in self._sums]).tolist()
        return f"{sum(key * found for key, found in zip(keys, sums, strict=True)) & (2**64 - 1):016x}"

    def _add_up(self, alike: list[tuple[int, Tensor]]) -> None:
        if alike:
            self._sums.append(([key for key, _ in alike], _sums([matrix for _, matrix in alike])))
            alike.clear()


def identity(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Compute the identity of tensors by name, as 16 hexadecimal digits."""
    whole = Identity()
    for name, tensor in tensors:
        whole.add(name, tensor)
    return str(whole)


def _sums(matrices: list[Tensor]) -> Tensor:
    """Sum each matrix's bits, times a number for the row and one for the column, modulo 2^64: [matrices].

    Zeros add nothing.
    """
    stack = matrices[0].unsqueeze(0) if len(matrices) == 1 else torch.stack(matrices)  # [matrices, rows, columns]
    rows, columns = (_odd(size, stack.device) for size in stack.shape[1:])
    step = max(1, _AT_ONCE[stack.device.type] // (len(stack) * stack.shape[2]))
    parts = [
        ((stack[:, start : start + step].to(torch.int64) * columns).sum(2) * rows[start : start + step]).sum(1)
        for start in range(0, stack.shape[1], step)
    ]
    return torch.stack(parts).sum(0)


@lru_cache(maxsize=64)
def _odd(count: int, device: torch.device) -> Tensor:
    """Return [count] odd numbers without a pattern, the same on every device."""
    numbers = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    for factor in _FACTORS:
        numbers = numbers * factor
        numbers = numbers ^ (numbers >> 29)
    return numbers | 1


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) | 1


def share_of(whole: Tensor, slot: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of a whole matrix that is to lie in a worker's slot.

    The slot's size says along which dimension the matrix was divided. It has room for any rank, so it may be larger.
    Heads of keys and values that are fewer than workers are on several.
    """
    share = whole
    for dimension, (size, room) in enumerate(zip(whole.shape, slot.shape, strict=True)):
        if room < size:
            shares = size // room
            share = share.narrow(dimension, rank * shares // ranks * room, room)
    return share
