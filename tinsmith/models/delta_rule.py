"""The two operations of a gated delta net over packed sequences: a short causal convolution, and the gated delta rule.

Each sequence is computed from its own tokens and state only, and no multiplication by zero keeps sequences apart, so
that a NaN in one cannot reach another, forward or backward. On CUDA in bfloat16 they run on Triton kernels
(`kernels/delta_nets.py`), elsewhere on what is written here and in `kernels/delta_chunks.py`. `lengths` are the tokens
of each sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from tinsmith.kernels.delta_chunks import chunks_of, delta_rule_in_chunks, unit
from tinsmith.kernels.delta_nets import kernels_for
from tinsmith.kernels.device import upload


def convolve(x: Tensor, weight: Tensor, lengths: tuple[int, ...], before: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel of x [tokens, channels], then SiLU: weight [channels, taps].

    `before` [sequences, taps - 1, channels] comes before each sequence; None means zeros. Also returns what comes
    before the next token.
    """
    if max(lengths) == 1:
        earlier = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[1]) if before is None else before
        window = torch.cat([earlier, x.unsqueeze(1)], 1)  # [sequences, taps, channels]
        return silu((window.to(_exact(x)) * weight.t()).sum(1)).to(x.dtype), window[:, 1:]
    return _convolve(x, weight, lengths, before), _places_of(lengths, weight.shape[1] - 1, x.device).last_inputs(
        x, before
    )


def convolve_anew(x: Tensor, weight: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The outputs of `convolve` for sequences that begin here and are not continued."""
    return _convolve(x, weight, lengths, None)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over each sequence (Yang et al., arXiv 2412.06464), in float32 or float64.

    With S the state of a head [key_dim, value_dim], and for each token t query q and key k of length one, value v, α =
    exp(decay) and β:

        S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,     out_t = S_tᵀ q_t / sqrt(key_dim)

    query and key [tokens, key_heads, key_dim] are brought to length one here; value [tokens, value_heads, value_dim];
    decay and beta [tokens, value_heads]. `before` [sequences, value_heads, key_dim, value_dim] continues sequences;
    None means zeros. Returns [tokens, value_heads, value_dim] in the dtype of `value`, and the last states.
    """
    if max(lengths) == 1 and before is not None:
        return _step(query, key, value, decay, beta, before)
    return _delta_rule(query, key, value, decay, beta, lengths, before, keeps=True)


def gated_delta_rule_anew(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """The outputs of `gated_delta_rule` for sequences that begin here and are not continued."""
    return _delta_rule(query, key, value, decay, beta, lengths, None, keeps=False)[0]


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: tuple[int, ...],
    before: Tensor | None,
    keeps: bool,
) -> tuple[Tensor, Tensor]:
    kernels = kernels_for(value)
    if kernels is not None and kernels.serves(key, value):
        return kernels.delta_rule(query, key, value, decay, beta, lengths, before, keeps)
    chunks = chunks_of(lengths, key.shape[2], value.device)
    return delta_rule_in_chunks(query, key, value, decay, beta, chunks, before, keeps)


def _convolve(x: Tensor, weight: Tensor, lengths: tuple[int, ...], before: Tensor | None) -> Tensor:
    kernels = kernels_for(x)
    if kernels is not None and (before is None or not before.requires_grad):
        return kernels.convolution(x, weight, lengths, before)
    compute: Callable[..., Tensor] = _Convolution.apply
    return compute(x, weight, before, _places_of(lengths, weight.shape[1] - 1, x.device))


def _exact(x: Tensor) -> torch.dtype:
    """Return the precision to compute in: float32, or float64 if the inputs are."""
    return torch.promote_types(x.dtype, torch.float32)


def _step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, as the formula has it."""
    dtype, groups = _exact(value), value.shape[1] // key.shape[1]
    # [sequences, value_heads, 1, key_dim]
    q, k = (unit(x.to(dtype)).repeat_interleave(groups, 1).unsqueeze(2) for x in (query, key))
    state = before.to(dtype) * decay.to(dtype).exp()[:, :, None, None]
    # [sequences, value_heads, 1, value_dim]
    update = (value.to(dtype).unsqueeze(2) - k @ state) * beta.to(dtype)[:, :, None, None]
    state = state + k.mT * update
    out = (q @ state).squeeze(2) * key.shape[2] ** -0.5
    return out.to(value.dtype), state


@dataclass(frozen=True, eq=False)
class _Places:
    """Positions in a longer row with the inputs before each sequence, so that no window reaches a neighbour."""

    own: Tensor
    """[tokens] int64: the tokens in that longer row."""
    earlier: Tensor
    """[sequences, taps - 1] int64: the inputs before each sequence."""
    last: Tensor
    """[sequences, taps - 1] int64: the last inputs of each sequence."""

    def lay_out(self, x: Tensor, before: Tensor | None) -> Tensor:
        """The longer row [tokens + sequences · (taps - 1), channels]."""
        row = x.new_zeros(self.own.numel() + self.earlier.numel(), x.shape[1])
        row[self.own] = x
        if before is not None:
            row[self.earlier] = before.to(x.dtype)
        return row

    def last_inputs(self, x: Tensor, before: Tensor | None) -> Tensor:
        """[sequences, taps - 1, channels]: what comes before the next token."""
        return self.lay_out(x, before)[self.last]


@lru_cache(maxsize=16)
def _places_of(lengths: tuple[int, ...], history: int, device: torch.device) -> _Places:
    """Return the places in a row with `history` more tokens before each sequence. The layers of a pass share them."""
    counts = np.array(lengths)
    ends = np.cumsum(counts + history)  # of each sequence in the longer row
    own = np.arange(counts.sum()) + np.repeat(history * (1 + np.arange(len(counts))), counts)
    back = np.arange(history)
    earlier, last = (ends - counts - history)[:, None] + back, (ends - history)[:, None] + back
    return _Places(*(upload(array, device) for array in (own, earlier, last)))


class _Convolution(torch.autograd.Function):
    """Keeps its inputs alone, and computes the sum below the SiLU again in the backward."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        x, weight, before, places = arguments
        ctx.places = places
        ctx.save_for_backward(x, weight, before)
        return silu(_weighted_sums(places.lay_out(x, before), weight, places)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = grads
        x, weight, before = ctx.saved_tensors
        places, taps = ctx.places, weight.shape[1]
        row = places.lay_out(x, before)
        sums = _weighted_sums(row, weight, places)
        d_sums = torch.ops.aten.silu_backward(d_out.to(sums.dtype), sums)  # [tokens, channels]
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = torch.stack([(d_sums * row[places.own - (taps - 1 - tap)]).sum(0) for tap in range(taps)], 1).to(
                weight.dtype
            )
        # Each input reaches the sums of the next tokens: zeros stand where the longer row has none, and behind it.
        spread = d_sums.new_zeros(row.shape[0] + taps - 1, row.shape[1])
        spread[places.own] = d_sums
        d_row = spread[: row.shape[0]] * weight[:, taps - 1]
        for tap in range(taps - 1):
            d_row.addcmul_(spread[taps - 1 - tap :][: row.shape[0]], weight[:, tap].to(d_row.dtype))
        d_before = None
        if before is not None and ctx.needs_input_grad[2]:
            d_before = d_row[places.earlier].to(before.dtype)
        return d_row[places.own].to(x.dtype), d_weight, d_before, None


def _weighted_sums(row: Tensor, weight: Tensor, places: _Places) -> Tensor:
    """[tokens, channels]: the weighted sums of the tokens' windows. Those that reach into a neighbour are dropped."""
    taps = weight.shape[1]
    windows = row.shape[0] - taps + 1
    dtype = _exact(row)
    sums = row[:windows].to(dtype) * weight[:, 0]
    for tap in range(1, taps):
        sums.addcmul_(row[tap : tap + windows].to(dtype), weight[:, tap].to(dtype))
    return sums[places.own - (taps - 1)]
