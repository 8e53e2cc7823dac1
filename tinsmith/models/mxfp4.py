"""Experts in MXFP4 on disk, as GPT-OSS publishes them: four bits a number, and a scale for 32 neighbours.

A parameter [experts, in, out] is stored as its transpose: `NAME_blocks` [experts, out, groups, 16] uint8, of which each
byte holds two numbers, the first in its lower half, and `NAME_scales` [experts, out, groups] uint8, exponents of two
with a bias (OCP Microscaling Formats, version 1.0).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from tinsmith.errors import ConfigError

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of both tensors."""
METHOD = "mxfp4"
"""What a configuration calls it (`quant_method`)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7; from 8 they are negative."""
BIAS = 127
"""Of the exponents."""


class Packed(NamedTuple):
    """A parameter in MXFP4."""

    blocks: Tensor
    """[experts, out, groups, 16] uint8"""
    scales: Tensor
    """[experts, out, groups] uint8"""


@dataclass(frozen=True)
class StoredParameter:
    """A parameter in MXFP4 in safetensors files."""

    name: str
    blocks: Path
    """The file of its blocks."""
    scales: Path
    """The file of its scales."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[experts, in, out], as `dequantized` returns it."""
        name = f"{self.name}{BLOCKS}"
        with safe_open(self.blocks, framework="pt") as opened:
            return unpacked_shapes({name: tuple(opened.get_slice(name).get_shape())})[self.name]

    def read(self) -> Packed:
        """Read it into the host's memory."""
        return Packed(_tensor(self.blocks, f"{self.name}{BLOCKS}"), _tensor(self.scales, f"{self.name}{SCALES}"))


def stored_parameters(files: Sequence[Path]) -> dict[str, StoredParameter]:
    """Find the parameters in MXFP4 in these safetensors files, by name. Raises ConfigError if one has no scales."""
    places: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    found = {}
    for name in (name.removesuffix(BLOCKS) for name in places if name.endswith(BLOCKS)):
        if f"{name}{SCALES}" not in places:
            raise ConfigError(f"{files[0].parent}: its weights lack {name}{SCALES}; download them again")
        found[name] = StoredParameter(name, places[f"{name}{BLOCKS}"], places[f"{name}{SCALES}"])
    return found


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def unpacked_shapes(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters whose tensors have these; of those in MXFP4 as `dequantized` returns them."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        if name.endswith(BLOCKS):
            experts, outputs, groups, width = shape
            found[name.removesuffix(BLOCKS)] = (experts, groups * 2 * width, outputs)
        elif f"{name.removesuffix(SCALES)}{BLOCKS}" not in stored:
            found[name] = shape
    return found


def dequantized(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The parameter [experts, in, out], with the bits that transformers gives it."""
    blocks, scales = packed
    experts, outputs, groups, width = blocks.shape
    signed = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=blocks.device)
    found = torch.empty(experts, groups * 2 * width, outputs, dtype=dtype, device=blocks.device)
    for own, bits, exponents in zip(found, blocks, scales, strict=True):  # one by one: all of their numbers are large
        numbers = signed[torch.stack([bits & 15, bits >> 4], -1).flatten(-2).int()]  # [out, groups, 32]
        own.copy_(torch.ldexp(numbers, exponents.int().unsqueeze(-1) - BIAS).flatten(1).t())
    return found
