"""Triton kernels of the gated delta rule for bfloat16 on CUDA, forward and backward, over packed sequences.

They compute what `kernels/delta_chunks.py` computes, in its notation, in chunks of `CHUNK` tokens. Two kernels walk
along the chunks of a sequence, one forward and one backward, each program with the state of one head and some of its
value columns in registers; all others compute every chunk of every sequence at once. With T = (I + L)⁻¹ and X the
gradient of β v:

    prepare      t, β, 1 / |k|, 1 / |q| and T of each chunk
    advance      U = T (β (v - exp(t) k S)), then S' = exp(t_end) S + Rᵀ U
    output       out = exp(t) q S + P U
    return       Pᵀ d_out, what the gradient of U gets from the outputs of its own chunk
    retreat      X = Tᵀ (Pᵀ d_out + R dS'), then dS = exp(t_end) dS' + (exp(t) q)ᵀ d_out - (β exp(t) k)ᵀ X
    inside       what L and P give to the gradients: that of P is d_out Uᵀ, and that of L is -X Uᵀ
    across       what the states before and after a chunk give to them: d_out Sᵀ, -X Sᵀ, which is that of β exp(t) k,
                 and U dS'ᵀ
    finish       the gradients of queries and keys through their length, of decays and of β

Results in bfloat16 are as exact as if all was computed in float32 and rounded at the end. Matrices are multiplied in
bfloat16, which keeps 8 bits, so numbers are kept as a pair of bfloat16, a high and a low part, which keep 16. Inputs
are bfloat16 as they come: lengths of keys and queries, β and decays are multiplied in before or after, in float32, so
that products of inputs need one pair or none.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith.kernels.delta_backward import retreated, write_gradients
from tinsmith.kernels.delta_chunks import slices_of_heads
from tinsmith.kernels.delta_forward import Cuts, SomeHeads, advanced, prepared, put_out
from tinsmith.kernels.delta_nets import CHUNK, STATE_BYTES
from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import with_plain_rows

WIDTHS = (16, 32, 64, 128)
"""Widths of keys and values that the kernels compute."""


@lru_cache(maxsize=16)
def cuts_of(lengths: tuple[int, ...], device: torch.device) -> Cuts:
    """The chunks of a packed row of these sequences. The layers of a pass share the answer."""
    tokens = np.array(lengths)
    counts = -(-tokens // CHUNK)  # [sequences]
    starts, first = np.cumsum(tokens) - tokens, np.cumsum(counts) - counts
    inside = (np.arange(counts.sum()) - np.repeat(first, counts)) * CHUNK  # [chunks]
    chunks = np.stack([np.repeat(starts, counts) + inside, np.minimum(np.repeat(tokens, counts) - inside, CHUNK)], 1)
    sequences = np.stack([np.arange(len(tokens)), starts, tokens, first], 1)[np.argsort(-tokens, kind="stable")]
    return Cuts(upload(chunks.astype(np.int32), device), upload(sequences.astype(np.int32), device))


def serves(key: Tensor, value: Tensor) -> bool:
    """Whether the kernels compute heads like these.

    The key is [tokens, key_heads, key_dim], the value [tokens, value_heads, value_dim].
    """
    return value.dtype == key.dtype == torch.bfloat16 and key.shape[2] in WIDTHS and value.shape[2] in WIDTHS


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    before: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    """`gated_delta_rule` of `models/delta_rule.py`. Unless `keeps`, the states are an empty tensor."""
    compute: Callable[..., tuple[Tensor, Tensor]] = _DeltaRuleOnKernels.apply
    return compute(query, key, value, decay, beta, before, cuts_of(lengths, value.device), keeps)


def _slices(inputs: tuple[Any, ...], cuts: Cuts) -> list[tuple[slice, slice, SomeHeads]]:
    """The inputs in slices of key heads and of value heads that `STATE_BYTES` allows."""
    query, key, value, decay, beta, before = inputs
    found = []
    for keys, values in slices_of_heads(
        key, value, STATE_BYTES // (len(cuts.chunks) * key.shape[2] * value.shape[2] * 4)
    ):
        mine = None if before is None else before[:, values].float().contiguous()
        heads = SomeHeads(query[:, keys], key[:, keys], value[:, values], decay[:, values], beta[:, values], mine, cuts)
        found.append((keys, values, heads))
    return found


class _DeltaRuleOnKernels(torch.autograd.Function):
    """Keeps its inputs alone for the backward, which computes the forward's states again."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, cuts, keeps = arguments
        query, key, value, decay, beta, before = tensors
        inputs = (with_plain_rows(query), with_plain_rows(key), with_plain_rows(value), decay, beta, before)
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        shape = (cuts.sequences.shape[0], value.shape[1], key.shape[2], value.shape[2]) if keeps else (0, 0)
        after = torch.empty(shape, dtype=torch.float32, device=value.device)
        slices = _slices(inputs, cuts)
        for _, values, mine in slices:
            inverses, factors = prepared(mine)
            ends = after[:, values] if keeps else None
            ends = (
                ends
                if ends is None or ends.is_contiguous()
                else torch.empty_like(ends, memory_format=torch.contiguous_format)
            )
            states, updates = advanced(mine, inverses, factors, ends)
            if ends is not None and len(slices) > 1:
                after[:, values] = ends
            put_out(mine, factors, states, updates, out[:, values])
        ctx.cuts, ctx.keeps = cuts, keeps
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        return out, after

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_out, d_after = grads
        inputs = ctx.saved_tensors
        value, before = inputs[2], inputs[5]
        d_out = torch.zeros_like(value) if d_out is None else with_plain_rows(d_out.to(value.dtype))
        d_after = d_after if ctx.keeps else None
        d_query, d_key, d_value, d_decay, d_beta = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:5]
        )
        wants_before = before is not None and ctx.needs_input_grad[5]
        d_before: Tensor | None = None
        slices = _slices(inputs, ctx.cuts)
        if wants_before:
            d_before = torch.empty_like(before, memory_format=torch.contiguous_format)
        for keys, values, mine in slices:
            inverses, factors = prepared(mine)
            states, updates = advanced(mine, inverses, factors, None)
            behind = None if d_after is None else d_after[:, values].float().contiguous()
            start = torch.empty_like(mine.before) if wants_before and mine.before is not None else None
            d_states, solved = retreated(mine, inverses, factors, d_out[:, values], behind, d_value[:, values], start)
            del inverses
            if d_before is not None:
                assert start is not None
                d_before[:, values] = start.to(d_before.dtype)
            targets = (d_query[:, keys], d_key[:, keys], d_decay[:, values], d_beta[:, values])
            write_gradients(mine, factors, states, updates, d_out[:, values], d_states, solved, targets)
        return d_query, d_key, d_value, d_decay, d_beta, d_before, None, None
