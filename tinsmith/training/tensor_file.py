"""Computes the layout of a safetensors file, so that several processes can write one file together.

Header and positions follow from names and shapes alone. They are those that safetensors itself gives to a file of these tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

_ALIGNED = 8
"""The tensors begin at a multiple of so many bytes."""
_LENGTH_BYTES = 8
"""Bytes in front of the header, which hold its length."""
BYTES = 4
"""Bytes of an element: all are float32."""


@dataclass(frozen=True)
class TensorFile:
    """A file of float32 tensors."""

    header: bytes
    """Its first bytes, up to the first tensor."""
    starts: Mapping[str, int]
    """Offset of each tensor, in bytes from the beginning of the file."""

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> "TensorFile":
        """The file of tensors of these shapes, whatever their order."""
        entries: dict[str, dict[str, object]] = {}
        ends = [0]
        for name in sorted(shapes):
            ends.append(ends[-1] + BYTES * prod(shapes[name]))
            entries[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": ends[-2:]}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNED)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        return cls(header, {name: len(header) + end for name, end in zip(entries, ends, strict=False)})
