"""LoRA products for vLLM on a CPU, adapter by adapter.

vLLM's own products copy an adapter's matrices for every token, which costs time and memory, and apply the last slot's adapter to a token
without one (slot -1). These run inside vLLM; on a GPU they are not used.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


def shrink(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
    """Set `output` [tokens, rank] to scaling · inputs [tokens, in] · weights[slot]ᵀ, each token with its slot's; 0 where that is -1.

    `weights` are [slots, rank, in], or with a 1 behind the slots, as below.
    """
    output.zero_()
    for slot, rows in _groups(slots, len(inputs)):
        matrix = _matrix(weights, slot, output.dtype)
        output[rows, : len(matrix)] = scaling * (inputs[rows].to(output.dtype) @ matrix.T)


def expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
    """Add inputs [tokens, rank] · weights[slot]ᵀ to `output` [tokens, out], which is set to 0 before unless `add_inputs`."""
    columns = min(weights.shape[-2], output.shape[1])  # they are padded differently
    expand_slice(inputs, weights, output, slots, 0, columns, add_inputs)


def expand_slice(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, slice_offset: int, slice_size: int, add_inputs: bool = True
) -> None:
    """As `expand`, into the columns [slice_offset, slice_offset + slice_size)."""
    part = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        part.zero_()
    for slot, rows in _groups(slots, len(inputs)):
        part[rows] += inputs[rows].to(output.dtype) @ _matrix(weights, slot, output.dtype)[:slice_size].T


def _groups(slots: Tensor, tokens: int) -> Iterator[tuple[int, Tensor | slice]]:
    """The slots that are in use, and the tokens that use each."""
    used = slots.unique().tolist()
    for slot in used:
        if slot >= 0:
            yield slot, slice(None) if len(used) == 1 or len(slots) != tokens else torch.nonzero(slots == slot).squeeze(1)


def _matrix(weights: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
    return weights[slot].reshape(weights.shape[-2:]).to(dtype)
