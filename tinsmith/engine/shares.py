"""A pass divided among workers, and the parts of its result put together again."""

from collections.abc import Sequence

import numpy as np

from tinsmith.protocol.work import PassDone, RunPass

QUADRATIC_TOKENS = 2**15
"""Tokens of a sequence of which attention costs as much as all that grows with the length: for models of 1 to 8 billion parameters."""


def cost(tokens: int) -> float:
    """What a sequence costs, in tokens of a short one."""
    return tokens * (1 + tokens / QUADRATIC_TOKENS)


def divide(message: RunPass, count: int, most: int, everyone: bool = False) -> list[RunPass | None]:
    """The share of each of `count` workers; None for one that gets nothing, or an empty one if `everyone` takes part.

    The most expensive datum goes first, each to the worker with least to do so far among those whose share stays within `most` tokens, or
    else to the one with fewest. Datums keep their order within a share.
    """
    if count == 1:
        return [message]
    shares: list[list[int]] = [[] for _ in range(count)]
    costs, tokens = [0.0] * count, [0] * count
    for place in sorted(range(len(message.pieces)), key=lambda place: -message.lengths[place]):
        length = message.lengths[place]
        roomy = [rank for rank in range(count) if tokens[rank] + length <= most]
        rank = min(roomy, key=costs.__getitem__) if roomy else min(range(count), key=tokens.__getitem__)
        shares[rank].append(place)
        costs[rank] += cost(length)
        tokens[rank] += length
    return [_part(message, sorted(places)) if places or everyone else None for places in shares]


def _part(message: RunPass, places: Sequence[int]) -> RunPass:
    pieces, lengths = [message.pieces[place] for place in places], [message.lengths[place] for place in places]
    return RunPass(message.number, message.base_model, message.backward, pieces, lengths)


def same_outcome(one: PassDone, other: PassDone) -> bool:
    """Whether two workers that have computed the same datums say of each that it has a result, or that it has none."""
    return all(
        [(operation, index) for operation, index, *_ in of_one] == [(operation, index) for operation, index, *_ in of_other]
        for of_one, of_other in ((one.results, other.results), (one.failures, other.failures))
    )


def join(parts: Sequence[PassDone], tokens_per_pass: int) -> PassDone:
    """The result of a pass from those of its shares. A pass of all workers may have `tokens_per_pass` tokens from now on."""
    losses, values, logprobs = [], [], []
    for part in parts:
        datums, numbers = len(part.results), sum(map(len, part.metrics))
        floats = np.frombuffer(part.payload, dtype=np.float64, count=datums + numbers)
        losses.append(floats[:datums].tobytes())
        values.append(floats[datums:].tobytes())
        logprobs.append(part.payload[floats.nbytes :])
    return PassDone(
        parts[0].number,
        [result for part in parts for result in part.results],
        [failure for part in parts for failure in part.failures],
        tokens_per_pass,
        [names for part in parts for names in part.metrics],
        b"".join((*losses, *values, *logprobs)),
    )
