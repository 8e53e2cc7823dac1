"""Files of tensors, laid out as safetensors does it, and written straight from the device on which tensors lie.

The library itself wants them in the host's memory. To fill and free gigabytes there takes Python's lock from the thread
that trains.
"""

import json
from collections import deque
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
        """The file of tensors of these precisions and shapes, whatever their order."""
        entries: dict[str, dict[str, object]] = {}
        ends = [0]
        for name, (dtype, shape) in sorted(kinds.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
            ends.append(ends[-1] + dtype.itemsize * prod(shape))
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": ends[-2:]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNED)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(header, {name: len(header) + end for name, end in zip(entries, ends, strict=False)})


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of tensors; any thread may do this. Raises OSError."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    layout = TensorFile.of({name: (tensor.dtype, tensor.shape) for name, tensor in whole.items()})
    with path.open("wb") as file:
        file.write(layout.header)
        for names, run in _runs(whole):
            places = deque((layout.starts[name], whole[name].nbytes) for name in names)
            for piece in pieces_on_host(run):
                left = piece.numpy().data
                while left:
                    start, size = places.popleft()
                    part, left = left[:size], left[size:]
                    file.seek(start)
                    file.write(part)
                    if len(part) < size:
                        places.appendleft((start + len(part), size - len(part)))


def _runs(tensors: Mapping[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Tensors that lie one behind the other in memory travel at once: their names, and the bytes [n] of all."""
    names, end = list[str](), 0
    for name in sorted(tensors, key=lambda each: tensors[each].data_ptr()):
        tensor = tensors[name]
        if names and (tensor.data_ptr(), _memory(tensor)) != (end, _memory(tensors[names[0]])):
            yield names, _bytes_of([tensors[each] for each in names])
            names = []
        names.append(name)
        end = tensor.data_ptr() + tensor.nbytes
    if names:
        yield names, _bytes_of([tensors[each] for each in names])


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(run: Sequence[Tensor]) -> Tensor:
    first = run[0]
    start, size = first.storage_offset() * first.element_size(), sum(tensor.nbytes for tensor in run)
    empty = torch.empty(0, dtype=torch.uint8, device=first.device)
    return empty.set_(first.untyped_storage(), start, (size,), (1,))
