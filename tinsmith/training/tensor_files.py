"""Files of tensors, laid out as safetensors does it, and written straight from the device on which tensors lie.

The library itself wants them in the host's memory. To fill and free gigabytes there takes Python's lock from the thread
that trains.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tinsmith.kernels.device import pieces_on_host

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of safetensors for the precisions of weights and moments."""
_ALIGNED = 8
"""The tensors begin at a multiple of so many bytes."""
_LENGTH_BYTES = 8
"""Bytes in front of the header, which hold its length."""


@dataclass(frozen=True)
class TensorFile:
    """The layout of a file."""

    header: bytes
    """Its first bytes, up to the first tensor."""
    starts: Mapping[str, int]
    """Offset of each tensor, in bytes from the beginning of the file."""

    @classmethod
    def of(cls, kinds: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> "TensorFile":
        """The file of tensors of these precisions and shapes: the widest first, otherwise in this order."""
        entries: dict[str, dict[str, object]] = {}
        ends = [0]
        for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: -item[1][0].itemsize):
            ends.append(ends[-1] + dtype.itemsize * prod(shape))
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNED)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(header, {name: len(header) + end for name, end in zip(entries, ends, strict=False)})


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of tensors; any thread may do this. Raises OSError.

    Those of one memory stand in its order, and memories in the order of the names in them.
    """
    whole = {name: tensor.detach().contiguous() for name, tensor in sorted(tensors.items())}
    names: dict[int, str] = {}
    for name, tensor in whole.items():
        names.setdefault(_memory(tensor), name)

    def place(item: tuple[str, Tensor]) -> tuple[int, str, int]:
        return -item[1].itemsize, names[_memory(item[1])], item[1].data_ptr()

    whole = dict(sorted(whole.items(), key=place))
    with path.open("wb") as file:
        file.write(TensorFile.of({name: (tensor.dtype, tensor.shape) for name, tensor in whole.items()}).header)
        for run, times in _runs(list(whole.values())):
            for piece in pieces_on_host(run):
                file.write(piece.numpy().data if times == 1 else piece.numpy().tobytes() * times)


def _runs(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, int]]:
    """The bytes [n] of tensors that lie one behind the other, which travel at once.

    And how often they stand in the file: a small tensor that has several names travels once too.
    """
    start, times = 0, 1
    for place, (tensor, before) in enumerate(zip(tensors[1:], tensors, strict=False), 1):
        near = (_memory(tensor), tensor.dtype) == (_memory(before), before.dtype)
        if near and times == 1 and tensor.data_ptr() == before.data_ptr() + before.nbytes:
            continue
        if near and place == start + times and tensor.data_ptr() == before.data_ptr() and tensor.numel() == 1:
            times += 1
            continue
        yield _bytes_of(tensors[start : place - times + 1]), times
        start, times = place, 1
    if tensors:
        yield _bytes_of(tensors[start : len(tensors) - times + 1]), times


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(run: Sequence[Tensor]) -> Tensor:
    first = run[0]
    start, size = first.storage_offset() * first.element_size(), sum(tensor.nbytes for tensor in run)
    empty = torch.empty(0, dtype=torch.uint8, device=first.device)
    return empty.set_(first.untyped_storage(), start, (size,), (1,))
