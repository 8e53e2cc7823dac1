"""Matrices of experts in fewer bits than the base model has (`--expert-dtype`), and back.

A row of a matrix is cut into groups of neighbouring numbers that share a scale: each number is its group's scale times
what its code stands for.

    fp8     8 bits: 4 of exponent and 3 of fraction (e4m3); a row is one group, its scale in float32
    nf4     4 bits: 16 quantiles of a normal distribution (Dettmers et al., "QLoRA", arXiv 2305.14314), scaled by the
            largest of 64 numbers, in the base's precision, which holds it exactly
    mxfp4   4 bits: 2 of exponent and 1 of fraction (OCP Microscaling Formats 1.0), scaled by a power of two for 32
            numbers

Smaller groups of FP8 would be more exact by a thirtieth: its numbers have exponents of their own. Two codes of 4 bits
share a byte, the first in its lower half. Before a product, the matrices of one layer are unpacked into a `Scratch`,
the same for all layers: only `grouped_product.py` reads it, right behind. A decoding step on a GPU reads the codes
themselves (`kernels/experts.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tinsmith.errors import ConfigError
from tinsmith.kernels.device import move_weights
from tinsmith.kernels.dispatch import with_kernel
from tinsmith.models.layers import Experts
from tinsmith.models.layout import Layout
from tinsmith.models.mxfp4 import E2M1, METHOD, StoredParameter, dequantized

E4M3_MOST = 448.0
"""The largest number of e4m3."""
EXPERTS = ("gate_up_proj", "down_proj")
"""Names of transformers' parameters of a mixture."""
AT_ONCE = 2**26
"""Numbers that are quantized, or read back, at a time: in between each takes 8 bytes and more."""

NORMAL = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The code book of NF4."""


@dataclass(frozen=True)
class Format:
    """How numbers are coded."""

    name: str
    bits: int
    """Of each code."""
    group: int
    """Numbers of a row that share a scale; 0 for the whole row."""
    values: tuple[float, ...]
    """What each code stands for; empty for e4m3."""

    def groups(self, columns: int) -> int:
        """Number of scales of a row. The last group may be shorter."""
        return -(-columns // self.group) if self.group else 1

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Precision of scales of a base model in `dtype`; bytes are exponents of two, plus 127."""
        return {"fp8": torch.float32, "nf4": dtype, "mxfp4": torch.uint8}[self.name]

    def row_bytes(self, columns: int, dtype: torch.dtype) -> int:
        """Memory of a row of `columns` numbers of a base model in `dtype`."""
        return columns * self.bits // 8 + self.groups(columns) * self.scale_dtype(dtype).itemsize


FORMATS = {
    "fp8": Format("fp8", 8, 0, ()),
    "nf4": Format("nf4", 4, 64, NORMAL),
    "mxfp4": Format("mxfp4", 4, 32, (*E2M1, *(-value for value in E2M1))),
}


def format_of(source: str, layout: Layout, expert_dtype: str) -> Format | None:
    """The format that `--expert-dtype` asks for; None for the base's own precision.

    Raises ConfigError, naming `source`, for a model without experts, or one whose experts have an odd width.
    """
    if expert_dtype == "model":
        return None
    asked = f"{source}: --expert-dtype {expert_dtype}"
    if not layout.experts:
        raise ConfigError(f"{asked} is for mixtures of experts, and this {layout.family.model_type} is none; omit it")
    form = FORMATS[expert_dtype]
    odd = sorted({kind.width for kind in layout.experts.values() if kind.width * form.bits % 8})
    if odd:
        raise ConfigError(f"{asked}: its experts have a width of {odd[0]}, an odd number; use --expert-dtype fp8")
    return form


def bytes_of(form: Format, kind: Experts, hidden: int, dtype: torch.dtype) -> int:
    """Memory of the matrices of a mixture of experts of a base model in `dtype`."""
    inner, outer = (form.row_bytes(columns, dtype) for columns in (hidden, kind.width))  # of gate and up, of down
    return kind.count * (2 * kind.width * inner + hidden * outer)


def scratch_numbers(kinds: Iterable[Experts], hidden: int) -> int:
    """Numbers of a `Scratch` for these mixtures: those of gate and up, which are the most, of the largest."""
    return max(2 * kind.count * kind.width * hidden for kind in kinds)


class Scratch:
    """Memory for the matrices of one layer while they are multiplied, and what their codes stand for."""

    def __init__(self, form: Format, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.empty(numbers, dtype=dtype, device=device)
        self.table = torch.tensor(form.values, device=device)

    def shaped(self, *shape: int) -> Tensor:
        """Its beginning as a tensor of this shape, which holds what was written last."""
        return self.numbers[: torch.Size(shape).numel()].view(shape)


@dataclass(frozen=True, eq=False)
class QuantizedMatrices:
    """A matrix for each expert: [experts, out, in]. They are never trained.

    Of MXFP4 the codes are the blocks of gpt-oss's files, those of a row one behind the other.
    """

    form: Format
    codes: Tensor
    """[experts, out, bytes of a row] uint8"""
    scales: Tensor
    """[experts, out, groups]"""
    scratch: Scratch

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, size = self.codes.shape
        return experts, rows, size * 8 // self.form.bits

    def unpacked(self, ends: Tensor) -> Tensor:
        """The matrices [experts, out, in] in the scratch, until others are unpacked there.

        `ends` [experts] int32 says behind which row each expert ends: the matrices of those without rows are not
        written.
        """
        found = self.scratch.shaped(*self.shape)
        unpack(found, self.codes, self.scales, ends, self.scratch.table, self.form.group)
        return found

    def copied(self) -> Tensor:
        """The matrices [experts, out, in] in memory of their own, by PyTorch's operations alone."""
        scratch, size = self.scratch, _experts_at_once(self.shape)
        found = scratch.numbers.new_empty(self.shape)
        for out, codes, scales in zip(*(each.split(size) for each in (found, self.codes, self.scales)), strict=True):
            of_codes = (codes.to(out.device), scales.to(out.device))
            out.copy_(numbers_of(*of_codes, scratch.table, self.form.group))
        return found


Matrices = Tensor | QuantizedMatrices
"""A matrix for each expert: [experts, out, in]."""


@with_kernel("quantized")
def unpack(out: Tensor, codes: Tensor, scales: Tensor, ends: Tensor, table: Tensor, group: int) -> None:
    """Write the numbers of codes and scales, as `QuantizedMatrices` has them, to `out` [experts, out, in].

    `table` and `group` are as in `numbers_of`. Matrices of experts that have no row stay as they are: `ends` [experts]
    int32 are the ends of their rows.
    """
    used = ends.diff(prepend=ends.new_zeros(1)) > 0
    out.copy_(torch.where(used[:, None, None], numbers_of(codes, scales, table, group).to(out.dtype), out))


def numbers_of(codes: Tensor, scales: Tensor, table: Tensor, group: int) -> Tensor:
    """The numbers of codes [..., bytes of a row] and scales [..., groups] in float32: [..., in].

    `table` [16] says what codes stand for, and is empty for e4m3; `group` numbers share a scale, or for 0 a row.
    """
    if not len(table):
        return codes.view(torch.float8_e4m3fn).float() * scales
    values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]  # [..., in]
    if scales.dtype == torch.uint8:
        bits = torch.where(scales == 0, 1 << 22, scales.int() << 23)  # the least is no normal number
        scales = bits.int().view(torch.float32)
    return values * scales.float().repeat_interleave(group, -1)[..., : values.shape[-1]]


# From the numbers of a base model


def quantize(weight: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    """Codes [..., bytes of a row] and scales [..., groups] of numbers [..., in].

    Where a number is not finite, all of its group are read back so or as NaN.
    """
    if form.bits == 8:
        wide = weight.float()
        scales = _divisors(wide) / E4M3_MOST
        return (wide / scales).clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8), scales
    columns = weight.shape[-1]
    grouped = pad(weight.float(), (0, -columns % form.group)).unflatten(-1, (-1, form.group))  # [..., groups, group]
    if form.name == "nf4":
        most = _divisors(grouped)
        codes = torch.bucketize(grouped / most, _between(NORMAL, grouped.device))
        scales = most.to(weight.dtype)  # the same number: it is one of the weights
    else:
        most = grouped.abs().amax(-1, keepdim=True)
        exponents = most.frexp().exponent - 3  # the largest number lies between 4 and 8 of these, and 6 is the most
        exponents = torch.where(most.isfinite(), exponents.clamp(-127, 127), 128)
        codes = torch.bucketize(grouped.abs() * torch.ldexp(torch.ones_like(most), -exponents), _even(grouped.device))
        codes += 8 * grouped.signbit()
        scales = (exponents + 127).to(torch.uint8)
    pairs = codes.flatten(-2)[..., :columns].to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales.squeeze(-1)


def _divisors(numbers: Tensor) -> Tensor:
    """The largest of the last dimension, by absolute value; 1 for zeros."""
    most = numbers.abs().amax(-1, keepdim=True)
    return torch.where(most == 0, 1.0, most)


def _between(values: tuple[float, ...], device: torch.device) -> Tensor:
    """The middles between neighbours."""
    ordered = torch.tensor(values, device=device)
    return (ordered[1:] + ordered[:-1]) / 2


def _even(device: torch.device) -> Tensor:
    """The middles between numbers of e2m1, each a little lower where it is rounded up: to the even code."""
    middles = _between(E2M1, device)
    middles[1::2] = middles[1::2].nextafter(middles.new_zeros(()))
    return middles


class QuantizedParameter(nn.Module):
    """Stands in the place of a parameter of transformers' experts, and holds what the decoder computes with."""

    def __init__(self, form: Format, codes: Tensor, scales: Tensor, scratch: Scratch) -> None:
        super().__init__()
        self.form = form
        self.scratch = scratch
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)

    @property
    def matrices(self) -> QuantizedMatrices:
        return QuantizedMatrices(self.form, self.codes, self.scales, self.scratch)


@torch.no_grad()
def quantize_experts(
    language_model: nn.Module,
    layout: Layout,
    form: Format,
    dtype: torch.dtype,
    device: torch.device,
    home: torch.device,
    packed: Mapping[str, StoredParameter],
) -> set[str]:
    """Quantize the experts of a language model in `dtype`, one layer after another on `device`; leave them at `home`.

    So there is never more than one layer's in the base's precision on the device. `packed` are those that the language
    model has no numbers of: what is MXFP4 on disk stays as it is if that is the format. Returns the names of those that
    are no experts', and still have none.
    """
    hidden = layout.targets[f"layers.{next(iter(layout.experts))}.mlp.experts.gate_proj"].in_features
    scratch = Scratch(form, scratch_numbers(layout.experts.values(), hidden), dtype, device)
    for index, kind in layout.experts.items():
        path = f"layers.{index}.mlp.experts"
        module: Any = language_model.get_submodule(path)
        stored = {name: packed.get(f"{path}.{name}") for name in EXPERTS}
        for name, on_disk in stored.items():
            if on_disk is not None:
                delattr(module, name)
        move_weights(module, device)
        for name, on_disk in stored.items():
            if on_disk is not None and form.name == METHOD:
                blocks, scales = on_disk.read()
                codes = blocks.flatten(2)
            else:
                weight = getattr(module, name) if on_disk is None else dequantized(on_disk.read(), dtype).to(device)
                weight = weight if kind.clamped is None else weight.transpose(1, 2)  # [experts, out, in]
                codes, scales = (torch.cat(parts) for parts in zip(*_in_parts(weight, form), strict=True))
                if on_disk is None:
                    delattr(module, name)
            setattr(module, name, QuantizedParameter(form, codes, scales, scratch))
        module.to(home)  # biases too
    return set(packed) - {f"layers.{index}.mlp.experts.{name}" for index in layout.experts for name in EXPERTS}


def _in_parts(weight: Tensor, form: Format) -> Iterator[tuple[Tensor, Tensor]]:
    return (quantize(part.contiguous(), form) for part in weight.split(_experts_at_once(weight.shape)))


def _experts_at_once(shape: tuple[int, ...]) -> int:
    return max(1, AT_ONCE // (shape[1] * shape[2]))


def matrices_of(language_model: nn.Module, name: str) -> Matrices:
    """The matrices of experts that a language model holds under the name of transformers' parameter."""
    parent, _, child = name.rpartition(".")
    held: Tensor | QuantizedParameter = getattr(language_model.get_submodule(parent), child)
    return held.matrices if isinstance(held, QuantizedParameter) else held
