"""Triton kernels of `choose_next` and of the search of `truncate`.

Choosing takes three launches instead of a hundred, and reads the logits twice. A row is cut into chunks of 16³ tokens,
each a branch of the tree by which tokens are drawn (`choose.draw`). Sums within a row are added in an order that
depends on the vocabulary alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 16**3
"""Tokens of a program."""
LARGEST = 16**5
"""The largest vocabulary: the kernels know five levels of its tree."""


def choose_kernel(
    logits: Tensor,
    temperature: Tensor,
    seed: Tensor,
    sample: Tensor,
    position: Tensor,
    draws: int,
    left: Tensor | None,
    coldest: float,
) -> tuple[Tensor, Tensor]:
    """Choose tokens [n] and their log-probabilities [n] from logits [n, vocabulary] of at most `LARGEST` tokens.

    `left` [n, vocabulary] is -inf where a token is truncated; None draws from all. It is not drawn from, so that a row
    draws by the same numbers whether another row truncates or not. `draws` comes from `draws_needed`; no temperature is
    lower than `coldest`.
    """
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    left = left if left is None else left.contiguous()
    temperature, seed, sample, position = (numbers.contiguous() for numbers in (temperature, seed, sample, position))
    chunks = triton.cdiv(vocabulary, CHUNK)
    device = logits.device
    # The highest logit of a chunk, and the sum of exponentials
    parts = torch.empty(2, rows, chunks, dtype=torch.float32, device=device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=device)  # where the highest is
    # Levels 1, 2 and 3 of the tree
    nodes = torch.empty(rows, chunks * (256 + 16 + 1), dtype=torch.float64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    sizes = (rows, logits.stride(0), vocabulary, coldest)
    tree = {"CHUNKS": chunks, "PADDED": triton.next_power_of_2(chunks), "TRUNCATES": left is not None}
    scan: Any = _scan
    scan[(chunks, rows)](logits, temperature, parts, places, *sizes, CHUNK=CHUNK, num_warps=8)
    grow: Any = _grow
    grow[(chunks, rows)](logits, left, temperature, parts, nodes, *sizes, CHUNK=CHUNK, **tree, num_warps=8)
    walk: Any = _walk
    choice = (temperature, seed, sample, position)
    walk[(rows,)](
        logits, left, *choice, parts, places, nodes, tokens, logprobs, *sizes, DRAWS=draws, **tree, num_warps=1
    )
    return tokens, logprobs


@triton.jit
def _temperature_of(temperature: tl.tensor, row: tl.tensor, coldest: tl.tensor) -> tl.tuple:
    """Return the temperature of a row, and whether it takes the likeliest token."""
    own = tl.load(temperature + row)
    greedy = own == 0.0
    hottest = 3.0e38  # behind the vocabulary stands -inf, and -inf / inf is no number
    return tl.where(greedy, 1.0, tl.minimum(tl.maximum(own, coldest), hottest)), greedy


@triton.jit(do_not_specialize=["rows"])
def _scan(
    logits: tl.tensor,
    temperature: tl.tensor,
    parts: tl.tensor,
    places: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    coldest: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """Find the highest logit of one chunk of a row, its place, and the sum of exponentials."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    heat, _ = _temperature_of(temperature, row, coldest)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocabulary, other=float("-inf"))
    highest = tl.max(x, 0)
    first = tl.min(tl.where(x == highest, token, vocabulary - 1), 0)
    level = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp(tl.div_rn(x - level, heat)), 0)
    place = row * tl.num_programs(0) + chunk
    tl.store(parts + place, highest)
    tl.store(parts + rows * tl.num_programs(0) + place, total)
    tl.store(places + place, first)


@triton.jit
def _normalizer(
    parts: tl.tensor, row: tl.tensor, rows: tl.tensor, heat: tl.tensor, CHUNKS: tl.constexpr, PADDED: tl.constexpr
) -> tl.tuple:
    """Return the highest logit of a row, and the logarithm of the sum of all exponentials."""
    chunk = tl.arange(0, PADDED)
    place = row * CHUNKS + chunk
    highest = tl.load(parts + place, mask=chunk < CHUNKS, other=float("-inf"))
    totals = tl.load(parts + rows * CHUNKS + place, mask=chunk < CHUNKS, other=0.0)
    top = tl.max(highest, 0)
    level = tl.where(highest == float("-inf"), top, highest)  # such a chunk has a sum of 0
    return top, tl.log(tl.sum(totals * tl.exp(tl.div_rn(level - top, heat)), 0))


@triton.jit
def _kept(x: tl.tensor, left: tl.tensor, row: tl.tensor, vocabulary: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Return the log-probabilities `x` of some tokens of a row, -inf for those that are truncated."""
    found = tl.load(left + row.to(tl.int64) * vocabulary + token, mask=token < vocabulary, other=float("-inf"))
    return tl.where(found == float("-inf"), float("-inf"), x)


@triton.jit(do_not_specialize=["rows"])
def _grow(
    logits: tl.tensor,
    left: tl.tensor,
    temperature: tl.tensor,
    parts: tl.tensor,
    nodes: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    coldest: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    TRUNCATES: tl.constexpr,
) -> None:
    """The branch of the tree that stands for one chunk of a row: three levels of sums of probabilities."""
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < vocabulary, other=float("-inf"))
    heat, _ = _temperature_of(temperature, row, coldest)
    top, normalizer = _normalizer(parts, row, rows, heat, CHUNKS, PADDED)
    x = tl.div_rn(x - top, heat) - normalizer
    if TRUNCATES:
        x = _kept(x, left, row, vocabulary, token)
    own = nodes + row.to(tl.int64) * (CHUNKS * 273)
    first = tl.sum(tl.reshape(tl.exp(x).to(tl.float64), [CHUNK // 16, 16]), 1)  # [256]
    tl.store(own + chunk * 256 + tl.arange(0, CHUNK // 16), first)
    second = tl.sum(tl.reshape(first, [CHUNK // 256, 16]), 1)  # [16]
    tl.store(own + CHUNKS * 256 + chunk * 16 + tl.arange(0, CHUNK // 256), second)
    tl.store(own + CHUNKS * 272 + chunk, tl.sum(second, 0))


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def _bits(numbers: tl.tensor, row: tl.tensor) -> tl.tensor:
    return tl.load(numbers + row).to(tl.uint64, bitcast=True)


@triton.jit(do_not_specialize=["rows"])
def _walk(
    logits: tl.tensor,
    left: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    sample: tl.tensor,
    position: tl.tensor,
    parts: tl.tensor,
    places: tl.tensor,
    nodes: tl.tensor,
    tokens: tl.tensor,
    logprobs: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    coldest: tl.tensor,
    CHUNKS: tl.constexpr,
    PADDED: tl.constexpr,
    DRAWS: tl.constexpr,
    TRUNCATES: tl.constexpr,
) -> None:
    """Choose a row's token: from its tree's root to a leaf, one random number a level (`randomness.uniforms`)."""
    row = tl.program_id(0)
    heat, greedy = _temperature_of(temperature, row, coldest)
    top, normalizer = _normalizer(parts, row, rows, heat, CHUNKS, PADDED)
    gamma = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(_bits(seed, row) + gamma)
    state = _mix(state ^ _mix(_bits(sample, row) + gamma * 2))
    state = _mix(state ^ _mix(_bits(position, row) + gamma * 3))
    child = tl.arange(0, 16)
    own = nodes + row.to(tl.int64) * (CHUNKS * 273)
    chosen = tl.full([], 0, tl.int32)
    for draw in tl.static_range(DRAWS):
        level = DRAWS - 1 - draw  # of the children, from leaves at 0
        node = chosen * 16 + child
        if level == 4:
            grandchild = child[:, None] * 16 + child[None, :]  # the root has no number yet
            found = tl.sum(tl.load(own + CHUNKS * 272 + grandchild, mask=grandchild < CHUNKS, other=0.0), 1)
        elif level == 3:
            found = tl.load(own + CHUNKS * 272 + node, mask=node < CHUNKS, other=0.0)
        elif level == 2:
            found = tl.load(own + CHUNKS * 256 + node, mask=node < CHUNKS * 16, other=0.0)
        elif level == 1:
            found = tl.load(own + node, mask=node < CHUNKS * 256, other=0.0)
        else:
            x = tl.load(logits + row.to(tl.int64) * stride + node, mask=node < vocabulary, other=float("-inf"))
            x = tl.div_rn(x - top, heat) - normalizer
            if TRUNCATES:
                x = _kept(x, left, row, vocabulary, node)
            found = tl.exp(x).to(tl.float64)
        number = (_mix(state + gamma * draw) >> 11).to(tl.float64) * (2.0**-53)
        cumulative = tl.cumsum(found, 0)
        total = tl.sum(tl.where(child == 15, cumulative, 0.0), 0)
        passed = (cumulative <= number * total) & (cumulative < total)
        chosen = chosen * 16 + tl.sum(passed.to(tl.int32), 0)
    chunk = tl.arange(0, PADDED)
    highest = tl.load(parts + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    place = tl.load(places + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=vocabulary - 1)
    likeliest = tl.min(tl.where(highest == top, place, vocabulary - 1), 0)
    token = tl.where(greedy, likeliest, tl.minimum(chosen, vocabulary - 1))
    x = tl.load(logits + row.to(tl.int64) * stride + token)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.div_rn(x - top, heat) - normalizer)


# Top-k and top-p: the search of `choose.truncate`


BITS = 4
"""Bits of the answer that one pass over the keys finds."""


def last_kept_kernel(keys: Tensor, weights: Tensor | None, least: Tensor) -> Tensor:
    """Compute `choose.last_kept_reference` for keys [n, vocabulary]: each pass splits by sixteen, not by two."""
    rows, vocabulary = keys.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    found = torch.full((rows,), -(2**31), dtype=torch.int64, device=keys.device)
    above = torch.zeros(rows, dtype=torch.int64, device=keys.device)
    parts = torch.empty(rows, chunks, 2**BITS, dtype=torch.int64, device=keys.device)
    count: Any = _count
    descend: Any = _descend
    weighed = (keys, 0) if weights is None else (weights, weights.stride(0))
    for shift in range(32 - BITS, -1, -BITS):
        inputs = (keys, weighed[0], found, parts, vocabulary, keys.stride(0), weighed[1])
        count[(chunks, rows)](*inputs, SHIFT=shift, BITS=BITS, CHUNK=CHUNK, WEIGHTED=weights is not None, num_warps=8)
        descend[(rows,)](
            parts,
            found,
            above,
            least,
            chunks,
            SHIFT=shift,
            BITS=BITS,
            PADDED=triton.next_power_of_2(chunks),
            num_warps=1,
        )
    return found.to(torch.int32)


@triton.jit
def _count(
    keys: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    parts: tl.tensor,
    vocabulary: tl.tensor,
    stride: tl.tensor,
    weights_stride: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    CHUNK: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> None:
    """Sum up the weights of one chunk's keys in each of the parts that may hold the answer."""
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = token < vocabulary
    key = tl.load(keys + row * stride + token, mask=inside, other=0).to(tl.int64)
    part = (key - tl.load(found + row)) >> SHIFT  # beyond the parts on either side there is nothing to count
    weight = tl.full([CHUNK], 1, tl.int64)
    if WEIGHTED:
        weight = tl.load(weights + row * weights_stride + token, mask=inside, other=0)
    own = parts + (row * tl.num_programs(0) + chunk) * (1 << BITS)
    for number in tl.static_range(1 << BITS):
        tl.store(own + number, tl.sum(tl.where(inside & (part == number), weight, 0), 0))


@triton.jit
def _descend(
    parts: tl.tensor,
    found: tl.tensor,
    above: tl.tensor,
    least: tl.tensor,
    chunks: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """Return the part in which the answer of one row lies, and the weight of all keys above that part."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, 1 << BITS)
    chunk = tl.arange(0, PADDED)
    place = (row * chunks + chunk[:, None]) * (1 << BITS) + number[None, :]
    weight = tl.sum(tl.load(parts + place, mask=(chunk < chunks)[:, None], other=0), 0)  # [parts]
    before = tl.load(above + row)
    from_here = tl.sum(tl.where(number[None, :] >= number[:, None], weight[None, :], 0), 1) + before  # [parts], falling
    enough = (from_here >= tl.load(least + row)) & (number > 0)
    chosen = tl.sum(enough.to(tl.int64), 0)
    tl.store(above + row, before + tl.sum(tl.where(number > chosen, weight, 0), 0))
    tl.store(found + row, tl.load(found + row) + (chosen << SHIFT))
