"""Top-k and top-p without sorting: which tokens of a vocabulary are drawn from.

Tokens are ordered by their logits, and of equal ones the lower id comes first. Both rules keep a beginning of that order. To find where it
ends, an integer image of the logits that keeps their order is searched bit by bit for the last number that is kept. The number of steps is
fixed and nothing is read on the host, so that a CUDA graph can capture it.

Sums are of integers, so they are exact, in whatever order a device adds up: a set depends on its own row alone.
"""

import torch
from torch import Tensor

from tinsmith.models.dispatch import has_triton

WEIGHT_BITS = 44
"""The likeliest token weighs 2**44: sums over a vocabulary of 2**18 tokens fit into 63 bits."""


def truncate(logits: Tensor, logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`logprobs` [n, vocabulary] with -inf outside the top k tokens, then outside the smallest set of probability top_p among the rest.

    top_k [n] int64, of which values below 1 are off, and top_p [n] float32, of which 1 is off. The `logits` [n, vocabulary] float32 say
    which token is likelier: a high temperature makes their log-probabilities equal. The likeliest token is always kept.
    """
    keys = order_preserving(logits)  # [n, vocabulary]
    vocabulary = logits.shape[1]
    k = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    last = _last_kept(keys, None, k)
    tied = k - _above(keys, None, last)  # how many of the tokens at `last` are kept

    weights = ((logprobs - logprobs.amax(-1, keepdim=True)).exp() * 2.0**WEIGHT_BITS).to(torch.int64)
    above = _above(keys, weights, last)
    of_tie = torch.where(keys == last.unsqueeze(1), weights, 0).amax(-1)
    total = above + tied * of_tie
    enough = (total.to(torch.float64) * top_p.to(torch.float64)).ceil().to(torch.int64).clamp(min=1)
    inner = torch.maximum(_last_kept(keys, weights, enough), last)
    missing = enough - _above(keys, weights, inner)
    of_tie = torch.where(keys == inner.unsqueeze(1), weights, 0).amax(-1).clamp(min=1)
    fewer = (missing + of_tie - 1) // of_tie
    on = top_p < 1
    tied = torch.where(on, torch.where(inner == last, torch.minimum(fewer, tied), fewer), tied)
    last = torch.where(on, inner, last)

    level = keys == last.unsqueeze(1)
    kept = (keys > last.unsqueeze(1)) | (level & (level.cumsum(-1) <= tied.unsqueeze(1)))
    return logprobs.masked_fill(~kept, -torch.inf)


def order_preserving(numbers: Tensor) -> Tensor:
    """int32 numbers in the order of these float32 numbers; equal ones, such as 0 and -0, have equal images."""
    bits = (numbers + 0.0).view(torch.int32)  # -0 + 0 is 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _last_kept(keys: Tensor, weights: Tensor | None, least: Tensor) -> Tensor:
    """The largest number [n] int32 for which the keys from it on weigh `least` [n] or more; without weights each weighs 1."""
    if keys.is_cuda and has_triton():
        from tinsmith.sampling.truncation_kernels import last_kept_kernel

        return last_kept_kernel(keys, weights, least)
    return last_kept_reference(keys, weights, least)


def last_kept_reference(keys: Tensor, weights: Tensor | None, least: Tensor) -> Tensor:
    """The same in PyTorch."""
    found = torch.full_like(least, -(2**31), dtype=torch.int32)
    found = torch.where(_weight_from(keys, weights, torch.zeros_like(found)) >= least, 0, found)
    for bit in reversed(range(31)):
        larger = found + 2**bit
        found = torch.where(_weight_from(keys, weights, larger) >= least, larger, found)
    return found


def _above(keys: Tensor, weights: Tensor | None, last: Tensor) -> Tensor:
    """Sum up the weights of the keys above `last`: [n] int64."""
    return _weight_from(keys, weights, last + 1)


def _weight_from(keys: Tensor, weights: Tensor | None, first: Tensor) -> Tensor:
    """Sum up the weights of the keys from `first` [n] on: [n] int64."""
    chosen = keys >= first.unsqueeze(1)
    return chosen.sum(-1) if weights is None else torch.where(chosen, weights, 0).sum(-1)
