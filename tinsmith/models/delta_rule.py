"""The two operations of a gated delta net over packed sequences: a short causal convolution, and the gated delta rule.

Both take and give the state that continues each sequence. No multiplication by zero keeps sequences apart: each is computed from its own
tokens only, so that a NaN in one cannot reach another.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

CHUNK = 64
"""Tokens that the delta rule computes together, in multiplications of matrices."""


class DeltaState(NamedTuple):
    """What continues sequences in one layer."""

    inputs: Tensor
    """[sequences, taps - 1, channels]: the last inputs of the convolution, the latest last, zeros before the first token."""
    memory: Tensor
    """[sequences, value_heads, key_dim, value_dim] float32: the recurrent state."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of each sequence of a packed row."""

    lengths: tuple[int, ...]

    def starts(self) -> list[int]:
        """The first token of each sequence, and the end of the row."""
        return [0, *itertools.accumulate(self.lengths)]


def convolve(x: Tensor, weight: Tensor, lengths: Lengths, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel, then SiLU: x [tokens, channels], weight [channels, taps] -> [tokens, channels].

    `before` [sequences, taps - 1, channels] came before the first token of each sequence; None means zeros. Also returns what comes before
    the next token.
    """
    taps, starts = weight.shape[1], lengths.starts()
    if before is None:
        before = x.new_zeros(len(lengths.lengths), taps - 1, x.shape[1])
    parts, after = [], []
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        own = torch.cat([before[index], x[start:end]])  # [taps - 1 + length, channels]
        parts.append(torch.stack([own[tap : tap + end - start] * weight[:, tap] for tap in range(taps)]).sum(0))
        after.append(own[len(own) - taps + 1 :])
    return silu(torch.cat(parts)), torch.stack(after)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: Lengths, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over each sequence (Yang et al., arXiv 2412.06464), in float32 or float64.

    With S the state of a head [key_dim, value_dim], and for each token t query q and key k of length one, value v, α = exp(decay) and β:

        S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,     out_t = S_tᵀ q_t / sqrt(key_dim)

    query and key [tokens, key_heads, key_dim] are brought to length one here; value [tokens, value_heads, value_dim]; decay and beta
    [tokens, value_heads]. `before` [sequences, value_heads, key_dim, value_dim] continues sequences; None means zeros. Returns
    [tokens, value_heads, value_dim] in the dtype of `value`, and the states after the last tokens.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    groups = value.shape[1] // key.shape[1]
    query, key = (_unit(x.to(dtype)).repeat_interleave(groups, 1) for x in (query, key))  # [tokens, value_heads, key_dim]
    query = query * query.shape[-1] ** -0.5
    parts, after = [], []
    if before is None:
        before = value.new_zeros(len(lengths.lengths), value.shape[1], key.shape[2], value.shape[2], dtype=dtype)
    for index, (start, end) in enumerate(itertools.pairwise(lengths.starts())):
        state = before[index].to(dtype)
        for first in range(start, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            q, k, v = (x[rows].transpose(0, 1) for x in (query, key, value.to(dtype)))  # [value_heads, chunk, dim]
            out, state = _chunk(q, k, v, decay[rows].t().to(dtype), beta[rows].t().to(dtype), state)
            parts.append(out.transpose(0, 1))
        after.append(state)
    return torch.cat(parts).to(value.dtype), torch.stack(after)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _chunk(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of a sequence: query, key, value [heads, chunk, dim], decay, beta [heads, chunk], state [heads, key_dim, value_dim]."""
    total = decay.cumsum(-1)  # log of the decay since the chunk began
    apart = total.unsqueeze(-1) - total.unsqueeze(-2)
    earlier = torch.ones_like(apart, dtype=torch.bool).tril()
    between = apart.masked_fill(~earlier, -torch.inf).exp()  # [heads, chunk, chunk]: decay from token j to token i >= j
    weighted = key * beta.unsqueeze(-1)
    system = (weighted @ key.mT) * between  # its strict lower triangle: how each token's update sees those before it
    seen = value * beta.unsqueeze(-1) - (weighted * total.exp().unsqueeze(-1)) @ state
    updates = torch.linalg.solve_triangular(system, seen, upper=False, unitriangular=True)  # [heads, chunk, value_dim]
    out = (query * total.exp().unsqueeze(-1)) @ state + ((query @ key.mT) * between) @ updates
    last = total[:, -1:]
    state = state * last.exp().unsqueeze(-1) + (key * (last - total).exp().unsqueeze(-1)).mT @ updates
    return out, state
