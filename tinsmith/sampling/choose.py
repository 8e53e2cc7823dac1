"""Logits -> the next token of each sequence and its log-probability."""

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.sampling.randomness import uniforms

COLDEST = float(np.finfo(np.float32).tiny)
"""The lowest temperature above 0: devices without subnormal numbers take smaller ones for 0, and 0 / 0 is NaN."""
ROWS = 64
"""Sequences whose tokens are chosen at a time: with a large vocabulary float64 probabilities take more memory than the logits."""
BRANCHES = 16
"""Children of a node of the tree by which a token is drawn."""


@dataclass(frozen=True, eq=False)
class Choice:
    """How each of n sequences wants its next token chosen; all arrays [n]."""

    temperature: NDArray[np.float32]
    """0 takes the likeliest token."""
    top_k: NDArray[np.int64]
    """-1 is off."""
    top_p: NDArray[np.float32]
    """1 is off."""
    seed: NDArray[np.uint64]
    sample: NDArray[np.uint64]
    """Index among the samples of one request."""
    position: NDArray[np.uint64]
    """How many tokens the sequence has generated."""
    topk: NDArray[np.int64]
    """How many of the likeliest tokens to report; 0 is none."""

    def of(self, rows: slice) -> "Choice":
        """The choices of some of the sequences."""
        return Choice(*(getattr(self, field.name)[rows] for field in fields(self)))


@dataclass(frozen=True)
class Chosen:
    """The next token of one sequence."""

    token: int
    logprob: float
    """Under the whole distribution at the request's temperature, before top-k and top-p; for temperature 0 at temperature 1."""
    top: tuple[list[int], list[float]]
    """The likeliest tokens and their log-probabilities, likeliest first, as many as were asked for."""


def choose(logits: Tensor, how: Choice) -> list[Chosen]:
    """The next token for each row of `logits` [n, vocabulary] (float32)."""
    chosen: list[Chosen] = []
    for start in range(0, len(logits), ROWS):
        rows = slice(start, start + ROWS)
        chosen += _choose_rows(logits[rows], how.of(rows))
    return chosen


def _choose_rows(logits: Tensor, how: Choice) -> list[Chosen]:
    temperature = torch.from_numpy(how.temperature).to(logits.device).unsqueeze(1)
    greedy = temperature == 0
    logprobs = logprobs_at(logits, torch.where(greedy, 1.0, temperature))
    u = uniforms(how.seed, how.sample, how.position, draws_needed(logits.shape[1]))
    drawn = draw(truncate(logits, logprobs, how.top_k, how.top_p), u[..., np.newaxis]).squeeze(1)
    tokens = torch.where(greedy.squeeze(1), logits.argmax(-1), drawn) if (how.temperature == 0).any() else drawn
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    tops = _tops(logits, logprobs, how.topk)
    return [Chosen(*parts) for parts in zip(tokens.tolist(), chosen.tolist(), tops, strict=True)]


def logprobs_at(logits: Tensor, temperature: Tensor) -> Tensor:
    """Log-probabilities [n, vocabulary] at temperatures above 0 [n, 1], however small.

    The likeliest token is moved to 0 first, so that no temperature can divide it to infinity.
    """
    return ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=COLDEST)).log_softmax(-1)


def _tops(logits: Tensor, logprobs: Tensor, topk: NDArray[np.int64]) -> list[tuple[list[int], list[float]]]:
    largest = int(topk.max())
    if largest == 0:
        return [([], [])] * len(topk)
    ids = logits.topk(largest).indices  # a high temperature makes the log-probabilities of different tokens equal
    values = logprobs.gather(1, ids)
    return [(row[:k], own[:k]) for k, row, own in zip(topk.tolist(), ids.tolist(), values.tolist(), strict=True)]


def truncate(logits: Tensor, logprobs: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32]) -> Tensor:
    """`logprobs` [n, vocabulary] with -inf outside the top k tokens, then outside the smallest set of probability top_p among the rest.

    The `logits` [n, vocabulary] say which token is likelier: a high temperature makes their log-probabilities equal.
    """
    rows = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not rows.size:
        return logprobs
    index = torch.from_numpy(rows).to(logprobs.device)
    columns = logits[index].sort(stable=True, dim=-1, descending=True).indices
    ordered = logprobs[index].gather(1, columns)
    k = torch.from_numpy(np.where(top_k[rows] > 0, top_k[rows], logprobs.shape[1])).to(logprobs.device).unsqueeze(1)
    ordered = ordered.masked_fill(torch.arange(logprobs.shape[1], device=logprobs.device) >= k, -torch.inf)
    p = torch.from_numpy(top_p[rows]).to(logprobs.device).unsqueeze(1)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # probability of all likelier tokens
    dropped = (before >= p) & (p < 1)
    dropped[:, 0] = False  # the likeliest token is always kept, also by a top_p that is 0 in float32
    ordered = ordered.masked_fill(dropped, -torch.inf)
    return logprobs.index_copy(0, index, torch.empty_like(ordered).scatter_(1, columns, ordered))


def draws_needed(vocabulary: int) -> int:
    """How many random numbers `draw` takes for one token."""
    return max(1, math.ceil(math.log(vocabulary, BRANCHES) - 1e-9))


def draw(logprobs: Tensor, u: NDArray[np.float64]) -> Tensor:
    """Token ids [n, k] from log-probabilities [n, vocabulary] (not normalized) and `u` [draws_needed(vocabulary), n, k] in [0, 1).

    The vocabulary is a tree, and at each of its nodes inverse transform sampling chooses one of `BRANCHES` children. Over the whole
    vocabulary at once there would be as many borders as tokens at which a rounding difference of the logits, as other batch mates cause
    it, turns a number into the neighbouring token; here there are a few dozen. Sums are in float64: the tail of a large vocabulary keeps
    its share.
    """
    levels = [_filled(logprobs.exp())]
    for _ in u[1:]:
        levels.append(_filled(levels[-1].unflatten(1, (-1, BRANCHES)).sum(-1, dtype=torch.float64)))
    chosen = torch.zeros(u.shape[1:], dtype=torch.int64, device=logprobs.device)
    children = torch.arange(BRANCHES, device=logprobs.device)
    for level, numbers in zip(reversed(levels), torch.from_numpy(u).to(logprobs.device), strict=True):
        candidates = chosen.unsqueeze(-1) * BRANCHES + children  # [n, k, BRANCHES]
        cumulative = level.gather(1, candidates.flatten(1)).view_as(candidates).cumsum(-1, dtype=torch.float64)
        total = cumulative[..., -1:]
        # Never beyond the last child that has probability, whatever the product rounds to.
        passed = (cumulative <= numbers.unsqueeze(-1) * total) & (cumulative < total)
        chosen = chosen * BRANCHES + passed.sum(-1)
    return chosen


def _filled(level: Tensor) -> Tensor:
    """The level padded with nodes of probability 0, so that each parent has all its children."""
    missing = -level.shape[1] % BRANCHES
    return pad(level, (0, missing)) if missing else level
