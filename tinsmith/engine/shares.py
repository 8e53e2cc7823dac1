"""Divides a pass among workers by cost, and joins their results."""

from collections.abc import Mapping, Sequence

import numpy as np

from tinsmith.protocol.work import PassDone, RunPass

QUADRATIC_TOKENS = 2**15
"""Length of a sequence at which attention costs as much as all that grows with the length, for models of 1 to 8 billion parameters."""

PIXELS_OF_A_TOKEN = 32 * 32
"""Pixels of an image that become one token: 4 patches of 16x16. Qwen2.5-VL's 28x28 are near enough."""

TOWER_COST = 0.2
"""Cost of the vision tower for a token's pixels, in tokens that the language model trains on.

Of Qwen3-VL: a tower of 24 layers 1,024 wide (27 of 1,152 for the 8B) takes each of a token's 4 patches through 0.3 (0.4) billion weights,
and the mergers, forward alone: 2.6 (3.6) GFLOP. LoRA takes a token through the weights of the language model, and back to its inputs:
7, 16 and 30 GFLOP for 2B, 4B and 8B. That is 0.4, 0.16 and 0.12 of it.
"""

QUADRATIC_PIXELS = 1_600_000
"""Pixels of an image (6,250 patches) at which attention in such a tower costs as much as all that grows with the pixels."""


def cost(tokens: int) -> float:
    """Return the cost of a sequence, in tokens of a short one."""
    return tokens * (1 + tokens / QUADRATIC_TOKENS)


def image_cost(pixels: int, tokens: int) -> float:
    """Return the cost of an image that the vision tower has not computed, in tokens of a short sequence.

    It stands in a sequence of so many `tokens`, and models shrink images that are larger than they take: it has no more tokens.
    """
    computed = min(pixels, tokens * PIXELS_OF_A_TOKEN)
    return TOWER_COST * computed / PIXELS_OF_A_TOKEN * (1 + computed / QUADRATIC_PIXELS)


def divide(message: RunPass, count: int, most: int, everyone: bool = False) -> list[RunPass | None]:
    """Return the share of each of `count` workers; None for one that gets nothing, or an empty one if `everyone` takes part.

    The most expensive datum goes first, each to the worker that has then least to do among those whose share stays within `most` tokens,
    or else to the one with fewest. An image of several datums costs a worker once. Datums keep their order within a share.
    """
    if count == 1:
        return [message]
    shares: list[list[int]] = [[] for _ in range(count)]
    costs, tokens = [0.0] * count, [0] * count
    computed: list[set[str]] = [set() for _ in range(count)]
    of_images = _costs_of_images(message)
    alone = [cost(length) + sum(images.values()) for length, images in zip(message.lengths, of_images, strict=True)]
    for place in sorted(range(len(alone)), key=lambda place: -alone[place]):
        length, images = message.lengths[place], of_images[place]
        known = [sum(images[digest] for digest in images.keys() & there) for there in computed]
        roomy = [rank for rank in range(count) if tokens[rank] + length <= most]
        rank = min(roomy, key=lambda rank: costs[rank] - known[rank]) if roomy else min(range(count), key=tokens.__getitem__)
        shares[rank].append(place)
        costs[rank] += alone[place] - known[rank]
        tokens[rank] += length
        computed[rank] |= images.keys()
    return [_part(message, sorted(places)) if places or everyone else None for places in shares]


def _costs_of_images(message: RunPass) -> list[Mapping[str, float]]:
    """Return the cost of each datum's new images, by digest."""
    if not message.pixels:
        return [{} for _ in message.lengths]
    pairs = zip(message.lengths, message.pixels, strict=True)
    return [{digest: image_cost(pixels, length) for digest, pixels in images.items()} for length, images in pairs]


def _part(message: RunPass, places: Sequence[int]) -> RunPass:
    """Return the share of these datums, without pixels, which were for dividing."""
    pieces, lengths = [message.pieces[place] for place in places], [message.lengths[place] for place in places]
    return RunPass(message.number, message.base_model, message.backward, pieces, lengths)


def same_outcome(one: PassDone, other: PassDone) -> bool:
    """Whether two workers that have computed the same datums agree which have a result and which have none."""
    return all(
        [(operation, index) for operation, index, *_ in of_one] == [(operation, index) for operation, index, *_ in of_other]
        for of_one, of_other in ((one.results, other.results), (one.failures, other.failures))
    )


def join(parts: Sequence[PassDone], tokens_per_pass: int) -> PassDone:
    """Join the results of a pass's shares. A pass of all workers may have `tokens_per_pass` tokens from now on."""
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
        [took for part in parts for took in part.took],
        b"".join((*losses, *values, *logprobs)),
    )
