"""Gated delta nets and LoRA products for vLLM on a CPU, in plain torch.

vLLM's kernels of gated delta nets take two sizes of heads and bfloat16 only, whose rounding would hide an adapter that
is applied in part. Its LoRA products copy an adapter's matrices for every token, and apply the last slot's adapter to a
token without one (slot -1).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Gated delta nets

KERNEL_HEADS = (64, 128)


def kernels_take(layer: Any, inputs: Tensor) -> bool:
    """Return whether vLLM's own kernels can compute this layer."""
    return inputs.dtype == torch.bfloat16 and layer.head_k_dim == layer.head_v_dim and layer.head_k_dim in KERNEL_HEADS


def delta_net(layer: Any, taps: Tensor, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor) -> None:
    """Set `out` [tokens, value heads, value dim] for sequences that each continue the state in their slot.

    `taps` are the convolution's weights [channels, taps], `mixed` queries, keys and values before it [tokens,
    channels]; `b` and `a` are [tokens, value heads]. Sequences of one token come first and are computed together, then
    the others one by one.
    """
    count, ones = metadata.num_decodes + metadata.num_prefills, metadata.num_decodes
    slots = metadata.non_spec_state_indices_tensor[:count].long()
    ends = metadata.non_spec_query_start_loc[: count + 1].tolist()
    known = metadata.has_initial_state
    fresh = torch.zeros(count, dtype=torch.bool) if known is None else ~known[:count]
    groups = [(slice(0, ones), slice(0, ones))] if ones else []
    groups += [(slice(i, i + 1), slice(ends[i], ends[i + 1])) for i in range(ones, count)]
    conv_states, states = _channels_first(layer.kv_cache[0], len(taps)), layer.kv_cache[1].transpose(2, 3)
    for sequences, tokens in groups:
        rows, new = slots[sequences], fresh[sequences]
        size = len(rows)
        window = conv_states[rows].masked_fill(new[:, None, None], 0)  # [sequences, channels, taps - 1]
        window = torch.cat([window, mixed[tokens].view(size, -1, len(taps)).transpose(1, 2)], 2)
        conv_states[rows] = window[:, :, 1 - taps.shape[1] :]
        qkv = functional.silu(functional.conv1d(window, taps[:, None], groups=len(taps))).transpose(1, 2)
        state = states[rows].float().masked_fill(new[:, None, None, None], 0)
        values, state = _rule(
            layer, qkv.float(), b[tokens].view(size, -1, b.shape[1]), a[tokens].view(size, -1, a.shape[1]), state
        )
        states[rows] = state.to(states.dtype)
        out[tokens] = values.flatten(0, 1).to(out.dtype)


def _rule(layer: Any, qkv: Tensor, b: Tensor, a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the delta rule token by token.

    Returns values [sequences, tokens, heads, value dim] and the state [sequences, heads, key dim, value dim].
    """
    query, key, value = qkv.split([layer.key_dim, layer.key_dim, layer.value_dim], 2)
    value = value.unflatten(2, (-1, layer.head_v_dim))
    shared = layer.num_v_heads // layer.num_k_heads
    query, key = (
        _unit(part.unflatten(2, (-1, layer.head_k_dim))).repeat_interleave(shared, 2) for part in (query, key)
    )
    query = query * layer.head_k_dim**-0.5
    decay = (-layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias.float())).exp()
    strength = b.float().sigmoid()
    outputs = []
    for t in range(value.shape[1]):
        q, k = query[:, t, :, None], key[:, t, :, None]  # [sequences, heads, 1, key dim]
        state = state * decay[:, t, :, None, None]
        missing = (value[:, t, :, None] - k @ state) * strength[:, t, :, None, None]
        state = state + k.mT @ missing
        outputs.append((q @ state).squeeze(2))
    return torch.stack(outputs, 1), state


def _unit(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + 1e-6)


def _channels_first(states: Tensor, channels: int) -> Tensor:
    """View the convolution's states as [slots, channels, taps - 1], whichever way vLLM keeps them."""
    return states if states.shape[1] == channels else states.transpose(1, 2)


# LoRA products


def shrink(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
    """Set `output` [tokens, rank] to scaling · inputs · weights[slot]ᵀ, with each token's slot; 0 for slot -1.

    `inputs` are [tokens, in], `weights` [slots, rank, in], or with a 1 behind the slots.
    """
    output.zero_()
    for slot, rows in _groups(slots, len(inputs)):
        matrix = _matrix(weights, slot, output.dtype)
        output[rows, : len(matrix)] = scaling * (inputs[rows].to(output.dtype) @ matrix.T)


def expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
    """Add inputs [tokens, rank] · weights[slot]ᵀ to `output` [tokens, out], set to 0 first unless `add_inputs`."""
    columns = min(weights.shape[-2], output.shape[1])  # they are padded differently
    expand_slice(inputs, weights, output, slots, 0, columns, add_inputs)


def expand_slice(
    inputs: Tensor,
    weights: Tensor,
    output: Tensor,
    slots: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Do as `expand` with the columns [slice_offset, slice_offset + slice_size)."""
    part = output[:, slice_offset : slice_offset + slice_size]
    if not add_inputs:
        part.zero_()
    for slot, rows in _groups(slots, len(inputs)):
        part[rows] += inputs[rows].to(output.dtype) @ _matrix(weights, slot, output.dtype)[:slice_size].T


def _groups(slots: Tensor, tokens: int) -> Iterator[tuple[int, Tensor | slice]]:
    """Yield the slots that are in use, and the tokens that use each."""
    used = slots.unique().tolist()
    for slot in used:
        if slot >= 0:
            yield (
                slot,
                slice(None) if len(used) == 1 or len(slots) != tokens else torch.nonzero(slots == slot).squeeze(1),
            )


def _matrix(weights: Tensor, slot: int, dtype: torch.dtype) -> Tensor:
    return weights[slot].reshape(weights.shape[-2:]).to(dtype)
