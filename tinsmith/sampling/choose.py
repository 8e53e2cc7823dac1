"""Turns logits into the next token of each sequence and its log-probability."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.kernels.device import upload
from tinsmith.kernels.dispatch import on_kernels
from tinsmith.sampling.shaping import Shape, keep_to_grammars, leave_unlikely, penalize
from tinsmith.wire.sample import SamplingParams

COLDEST = float(np.finfo(np.float32).tiny)
"""The lowest temperature above 0: smaller ones are subnormal, which some devices take for 0."""
ROWS = 64
"""Sequences whose tokens are chosen at a time, to limit the memory of probabilities in float64."""
BRANCHES = 16
"""Children of a node of the tree that `draw` descends."""


class Choice(NamedTuple):
    """Settings for choosing the next token of a sequence."""

    params: SamplingParams
    seed: int
    sample: int
    """Index among the samples of one request."""
    position: int
    """Number of tokens that the sequence has generated."""
    topk: int
    """Likeliest tokens to report."""
    shape: Shape | None = None
    """Changes its logits before; None changes nothing."""


@dataclass(frozen=True)
class Chosen:
    """The next token of one sequence."""

    token: int
    logprob: float
    """Taken before any token is left out, at the request's temperature, or at 1 if that is 0."""
    top: tuple[list[int], list[float]]
    """The likeliest tokens and their log-probabilities, likeliest first, as many as were asked for."""


@dataclass(frozen=True, eq=False)
class DeviceChoice:
    """Settings for choosing the next token of n rows, on the device of the logits; all tensors [n]."""

    temperature: Tensor
    """float32; 0 takes the likeliest token."""
    top_k: Tensor
    """int64; values below 1 are off."""
    top_p: Tensor
    """float32; 1 is off."""
    seed: Tensor
    """int64, with the bits of a number of 0 to 2**64 - 1; so are `sample` and `position`."""
    sample: Tensor
    """Index among the samples of one request."""
    position: Tensor
    """Number of tokens that the sequence has generated."""

    @classmethod
    def of(cls, rows: Sequence[Choice], device: torch.device) -> "DeviceChoice":
        """Upload what the rows are sampled with, a tensor [rows] for each parameter."""
        params = [row.params for row in rows]
        temperature, top_p = (
            np.array(numbers, np.float32) for numbers in ([p.temperature for p in params], [p.top_p for p in params])
        )
        top_k = np.array([p.top_k for p in params], dtype=np.int64)
        bits = [
            as_bits(numbers) for numbers in zip(*((row.seed, row.sample, row.position) for row in rows), strict=True)
        ]
        return cls(
            *(upload(array, device) for array in (temperature, top_k, top_p)),
            *(upload(array.numpy(), device) for array in bits),
        )


def choose_next(logits: Tensor, choice: DeviceChoice, truncates: bool) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row of `logits` [n, vocabulary] float32; return tokens and log-probabilities.

    Tokens are [n] int64, log-probabilities [n] float32 as in `Chosen.logprob`. top_k and top_p are obeyed only if
    `truncates`. Nothing is read on the host, so that a CUDA graph can capture it.
    """
    if on_kernels("choose", logits):
        from tinsmith.kernels.choose import LARGEST, choose_kernel

        if logits.shape[1] <= LARGEST:
            left = truncate(logits, _logprobs(logits, choice), choice.top_k, choice.top_p) if truncates else None
            draws = draws_needed(logits.shape[1])
            return choose_kernel(
                logits, choice.temperature, choice.seed, choice.sample, choice.position, draws, left, COLDEST
            )
    return choose_reference(logits, choice, truncates)


def choose_reference(logits: Tensor, choice: DeviceChoice, truncates: bool) -> tuple[Tensor, Tensor]:
    """Compute `choose_next` in PyTorch."""
    greedy = choice.temperature == 0
    logprobs = _logprobs(logits, choice)
    u = uniforms(choice.seed, choice.sample, choice.position, draws_needed(logits.shape[1]))
    left = truncate(logits, logprobs, choice.top_k, choice.top_p) if truncates else logprobs
    drawn = draw(left, u.unsqueeze(-1)).squeeze(1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _logprobs(logits: Tensor, choice: DeviceChoice) -> Tensor:
    return logprobs_at(logits, _temperature(choice).unsqueeze(1))


def _temperature(choice: DeviceChoice) -> Tensor:
    """Return the temperatures [n] of log-probabilities: those of the likeliest token, chosen at 0, are at 1."""
    return torch.where(choice.temperature == 0, 1.0, choice.temperature)


def choose(logits: Tensor, how: Sequence[Choice]) -> list[Chosen]:
    """Choose the next token for each row of `logits` [n, vocabulary] float32, as `choose_next` does."""
    chosen: list[Chosen] = []
    for start in range(0, len(logits), ROWS):
        some, rows = logits[start : start + ROWS], how[start : start + ROWS]
        truncates = any(row.params.top_k > 0 or row.params.top_p < 1 for row in rows)
        choice = DeviceChoice.of(rows, logits.device)
        tokens, logprobs = choose_next(some, choice, truncates)
        shaped = [index for index, row in enumerate(rows) if row.shape is not None]
        if shaped:
            places = upload(np.array(shaped), logits.device)
            tokens[places], logprobs[places] = choose_shaped(some, places, [rows[index] for index in shaped])
        tops = _tops(some, [row.topk for row in rows], choice)
        chosen += [Chosen(*parts) for parts in zip(tokens.tolist(), logprobs.tolist(), tops, strict=True)]
    return chosen


def choose_shaped(logits: Tensor, rows: Tensor, how: Sequence[Choice]) -> tuple[Tensor, Tensor]:
    """Choose the next token of some rows [k] of `logits` [n, vocabulary], each of which has a `Shape`.

    Returns tokens and log-probabilities [k]. The penalties are subtracted in `logits`, so that their likeliest tokens
    have them too. Each row is computed by itself.
    """
    own, choice = logits.index_select(0, rows), DeviceChoice.of(how, logits.device)
    shapes = [row.shape for row in how if row.shape is not None]
    penalize(own, shapes)
    logits.index_copy_(0, rows, own)
    temperature = _temperature(choice)[:, None]
    logprobs = logprobs_at(own, temperature)
    candidates = keep_to_grammars(own, shapes)
    # From the logits left: what the grammar allows may be too unlikely for a number
    left = leave_unlikely(logprobs_at(candidates, temperature), shapes)
    candidates = candidates.masked_fill(left == -torch.inf, -torch.inf)
    u = uniforms(choice.seed, choice.sample, choice.position, draws_needed(own.shape[1]))
    drawn = draw(truncate(candidates, left, choice.top_k, choice.top_p), u.unsqueeze(-1)).squeeze(1)
    tokens = torch.where(choice.temperature == 0, candidates.argmax(-1), drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def logprobs_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """Compute log-probabilities [n, vocabulary] at temperatures above 0 [n, 1].

    The likeliest token is moved to 0 first, so that nothing becomes infinite.
    """
    return ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=COLDEST)).log_softmax(-1)


def _tops(logits: Tensor, counts: Sequence[int], choice: DeviceChoice) -> list[tuple[list[int], list[float]]]:
    largest = max(counts)
    if largest == 0:
        return [([], [])] * len(counts)
    ids, values = likeliest(logits, _temperature(choice), largest)
    return [(row[:k], own[:k]) for k, row, own in zip(counts, ids.tolist(), values.tolist(), strict=True)]


def likeliest(logits: Tensor, temperature: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Find the `count` likeliest tokens of each row, likeliest first, and their log-probabilities.

    Both are [n, count], for `temperature` [n].
    """
    ids = logits.topk(count).indices  # a high temperature makes the log-probabilities of different tokens equal
    return ids, logprobs_at(logits, temperature.unsqueeze(1)).gather(1, ids)


def draws_needed(vocabulary: int) -> int:
    """Return the number of random numbers that `draw` takes for one token."""
    return max(1, math.ceil(math.log(vocabulary, BRANCHES) - 1e-9))


def draw(logprobs: Tensor, u: Tensor) -> Tensor:
    """Draw token ids [n, k] from log-probabilities [n, vocabulary], which need not be normalized.

    `u` [draws_needed(vocabulary), n, k] float64 are random numbers in [0, 1). Inverse transform sampling chooses one of
    `BRANCHES` children at each node of a tree over the vocabulary. So a rounding difference of the logits, as other
    batch mates cause it, can change a token at a few dozen borders only, instead of at every token's. Sums are in
    float64 to keep the tail of a large vocabulary.
    """
    levels = [_filled(logprobs.exp())]
    for _ in u[1:]:
        levels.append(_filled(levels[-1].unflatten(1, (-1, BRANCHES)).sum(-1, dtype=torch.float64)))
    chosen = torch.zeros(u.shape[1:], dtype=torch.int64, device=logprobs.device)
    children = torch.arange(BRANCHES, device=logprobs.device)
    for level, numbers in zip(reversed(levels), u, strict=True):
        candidates = chosen.unsqueeze(-1) * BRANCHES + children  # [n, k, BRANCHES]
        cumulative = level.gather(1, candidates.flatten(1)).view_as(candidates).cumsum(-1, dtype=torch.float64)
        total = cumulative[..., -1:]
        # Never beyond the last child that has probability, whatever the product rounds to.
        passed = (cumulative <= numbers.unsqueeze(-1) * total) & (cumulative < total)
        chosen = chosen * BRANCHES + passed.sum(-1)
    return chosen


def _filled(level: Tensor) -> Tensor:
    """Pad a level with nodes of probability 0, so that each parent has all its children."""
    missing = -level.shape[1] % BRANCHES
    return pad(level, (0, missing)) if missing else level


# Top-k and top-p


WEIGHT_BITS = 44
"""The likeliest token weighs 2**44: sums over a vocabulary of 2**18 tokens fit into 63 bits."""


def truncate(logits: Tensor, logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Apply top-k, then top-p among the tokens left: return `logprobs` with -inf for all others.

    `logprobs` and `logits` are [n, vocabulary] float32. top_k [n] int64 is off below 1, and top_p [n] float32 at 1; it
    keeps the smallest set with at least that share of the probability left. Tokens are ordered by `logits`, because a
    high temperature makes log-probabilities equal, then by id. Both rules keep a beginning of that order, whose end is
    searched bit by bit in an integer image of the logits. Sums are of integers, hence exact on every device. Nothing is
    read on the host, so that a CUDA graph can capture it.
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
    """Map float32 numbers to int32 numbers of the same order; equal ones, such as 0 and -0, have equal images."""
    bits = (numbers + 0.0).view(torch.int32)  # -0 + 0 is 0
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _last_kept(keys: Tensor, weights: Tensor | None, least: Tensor) -> Tensor:
    """Find the largest number [n] int32 such that keys >= it weigh `least` [n] or more; without weights, 1 each."""
    if on_kernels("choose", keys):
        from tinsmith.kernels.choose import last_kept_kernel

        return last_kept_kernel(keys, weights, least)
    return last_kept_reference(keys, weights, least)


def last_kept_reference(keys: Tensor, weights: Tensor | None, least: Tensor) -> Tensor:
    """Compute `_last_kept` in PyTorch."""
    found = torch.full_like(least, -(2**31), dtype=torch.int32)
    found = torch.where(_weight_from(keys, weights, torch.zeros_like(found)) >= least, 0, found)
    for bit in reversed(range(31)):
        larger = found + 2**bit
        found = torch.where(_weight_from(keys, weights, larger) >= least, larger, found)
    return found


def _above(keys: Tensor, weights: Tensor | None, last: Tensor) -> Tensor:
    return _weight_from(keys, weights, last + 1)


def _weight_from(keys: Tensor, weights: Tensor | None, first: Tensor) -> Tensor:
    """Sum up the weights of the keys from `first` [n] on: [n] int64."""
    chosen = keys >= first.unsqueeze(1)
    return chosen.sum(-1) if weights is None else torch.where(chosen, weights, 0).sum(-1)


# Random numbers


_GAMMA = 0x9E3779B97F4A7C15


def as_bits(numbers: Sequence[int] | np.ndarray) -> Tensor:
    """View numbers [n] of 0 to 2**64 - 1 as int64 with the same bits, on the CPU."""
    return torch.from_numpy(np.array(numbers, dtype=np.uint64).view(np.int64))


def uniforms(seeds: Tensor, samples: Tensor, positions: Tensor, count: int = 1) -> Tensor:
    """Return `count` numbers in [0, 1), [count, n] float64, for each (seed, sample, position), all [n] int64.

    They depend on nothing else: SplitMix64 (Steele, Lea and Flood, 2014) hashes the three in integers of 64 bits, with
    the same result on every device.
    """
    state = _mix(seeds + _signed(_GAMMA))
    state = _mix(state ^ _mix(samples + _signed(2 * _GAMMA)))
    state = _mix(state ^ _mix(positions + _signed(3 * _GAMMA)))
    steps = torch.arange(count, device=state.device).unsqueeze(1) * _signed(_GAMMA)
    state = _mix(state + steps)  # [count, n]
    return _shifted(state, 11).to(torch.float64) * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right without repeating the sign, as PyTorch does."""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)


def _signed(bits: int) -> int:
    """Return the int64 with the last 64 of these bits."""
    return (bits + 2**63) % 2**64 - 2**63
