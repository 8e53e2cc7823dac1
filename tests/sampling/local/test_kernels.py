"""Numbers that a step of the sampler computes from its caches, against plain formulas.

Kernels are compared with their references; on a CPU they run in Triton's interpreter, which knows no bfloat16, on CUDA
as they are.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from tests.bases import DEVICE
from tests.extent import amount, slow
from tinsmith.memory.budget import BLOCK, CacheShape, blocks_for
from tinsmith.models.layers import Attention
from tinsmith.sampling.local import cached_attention
from tinsmith.sampling.local.cached_attention import CachedPlan, Window, paged_reference
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.local.states import convolve_step_reference, delta_step_reference

SCALE = 0.3
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# Whole pieces of prompts


@pytest.mark.parametrize("sinks", [None, [0.5, -2.0, 3.0, 6.0]])
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(8, torch.float32), *([] if DEVICE == "cpu" else [(n, HALF) for n in (64, 128, 256)])]
)
def test_pieces_give_what_the_whole_gives(
    head_dim: int, dtype: torch.dtype, window: int | None, sinks: list[float] | None
) -> None:
    """Three sequences go through several rows of fresh and continued windows of all widths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [23, 70, 9]
    cuts = [[0, 20, 21, 22, 23], [0, 1, 30, 33, 70], [0, 4, 5, 6, 9]]
    cache = KVCache(CacheShape((Attention(2, head_dim),), dtype, torch.device(DEVICE)), 20)
    blocks = [cache.take(blocks_for(n)) for n in lengths]
    query, key, value = (
        [torch.randn(n, heads, head_dim, generator=generator).to(DEVICE, dtype) for n in lengths] for heads in (4, 2, 2)
    )
    parts: list[list[torch.Tensor]] = [[], [], []]
    of_heads = None if sinks is None else torch.tensor(sinks, dtype=dtype, device=DEVICE)
    for step in range(4):
        windows = [
            Window(own[: blocks_for(cut[step + 1])], cut[step], cut[step + 1])
            for own, cut in zip(blocks, cuts, strict=True)
        ]
        q, k, v = (
            torch.cat([x[w.start : w.end] for x, w in zip(xs, windows, strict=True)]) for xs in (query, key, value)
        )
        out = CachedPlan(cache, windows).attend(0, q, k, v, SCALE, window, of_heads)
        for own, piece in zip(parts, out.split([len(w) for w in windows]), strict=True):
            own.append(piece)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for q, k, v, pieces, length in zip(query, key, value, parts, lengths, strict=True):
        expected = whole(q.double(), k.double(), v.double(), length, window, of_heads)
        torch.testing.assert_close(torch.cat(pieces).double(), expected, atol=bound, rtol=0)


def test_a_piece_of_a_long_prompt_takes_no_memory_for_all_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 on CUDA PyTorch's kernel without them takes no groups of heads: 2048 tokens behind 30000 took 19 GiB,
    and 1.3 without."""
    calls = list[tuple[Tensor, Tensor, Tensor, bool]]()

    def counted(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, scale: float, enable_gqa: bool = False) -> Tensor:
        calls.append((q, k, v, enable_gqa))
        return scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(cached_attention, "scaled_dot_product_attention", counted)
    cache = KVCache(CacheShape((Attention(2, 8),), torch.float32, torch.device(DEVICE)), 20)
    query, key = (torch.randn(20, heads, 8, device=DEVICE) for heads in (4, 2))
    CachedPlan(cache, [Window(cache.take(blocks_for(60)), 40, 60)]).attend(0, query, key, key, SCALE, None, None)
    assert [(q.shape[1], k.shape[1], v.shape[1], gqa) for q, k, v, gqa in calls] == [(4, 4, 4, False)]


def whole(
    query: Tensor, key: Tensor, value: Tensor, last: int, window: int | None, sinks: Tensor | None = None
) -> Tensor:
    """Attention of the last queries to all keys, or the last `window` of them; shapes as in `PassPlan.attend`."""
    length = len(key)
    ones = torch.ones(length, length, dtype=torch.bool, device=key.device)
    mask = (ones.tril() if window is None else ones.tril() & ones.triu(1 - window))[length - last :]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    if sinks is not None:  # the last of the keys, whose value is nothing
        of_each = torch.cat([torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf)] * len(sinks))
        of_each = torch.cat([of_each.view(len(sinks), *mask.shape), sinks.to(q).view(-1, 1, 1).expand(-1, last, 1)], 2)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=of_each, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)


# One token for each row


class Cached:
    """Rows of random length with keys and values in scattered blocks.

    All else is NaN: other blocks, and places behind a row's length.
    """

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        most = max(1, *(blocks_for(length) for length in lengths))
        blocks = torch.randperm(len(lengths) * most + 1, generator=generator)
        self.table = blocks[1:].view(len(lengths), most).to(DEVICE, torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.query = torch.randn(len(lengths), heads, head_dim, generator=generator).to(DEVICE, dtype)
        size = (len(lengths), most * BLOCK, kv_heads, head_dim)
        self.of_rows = [torch.randn(size, generator=generator).to(DEVICE, dtype) for _ in range(2)]
        for memory in self.of_rows:
            for row, length in zip(memory, lengths, strict=True):
                row[length:] = math.nan
        self.keys, self.values = (self._scatter(memory) for memory in self.of_rows)

    def _scatter(self, memory: Tensor) -> Tensor:
        blocks = torch.full(
            (self.table.numel() + 1, BLOCK, *memory.shape[2:]), math.nan, dtype=memory.dtype, device=DEVICE
        )
        blocks[self.table.flatten().long()] = memory.view(-1, *blocks.shape[1:])
        return blocks

    def exact(self, window: int | None, sinks: Tensor | None = None) -> Tensor:
        """The formula in float64, row by row."""
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=DEVICE)
        groups = self.query.shape[1] // self.keys.shape[2]
        for row, length in enumerate(self.lengths.tolist()):
            first = 0 if window is None else max(0, length - window)
            if length:
                k, v = (memory[row, first:length].double().repeat_interleave(groups, 1) for memory in self.of_rows)
                scores = torch.einsum("hd,nhd->hn", self.query[row].double(), k) * SCALE
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double().unsqueeze(1)], 1)
                out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(k)], v)
        return out


LENGTHS = [[1], [0, 5, 16, 17, 15], [150, 3, 0, 129, 65]]
SHAPES = [(4, 2, 64), (2, 1, 128), (3, 3, 256), (18, 1, 24)]


USUAL = [(HALF, 0, None), (HALF, 1, 20), (HALF, 2, None), (HALF, 3, 20), (torch.float32, 0, 20)]
"""Each shape once in half precision, with a window or without, and one in float32."""
OTHERS = [
    case for case in itertools.product((HALF, torch.float32), range(len(SHAPES)), (None, 1, 20)) if case not in USUAL
]


@pytest.mark.parametrize(("dtype", "heads", "window"), [*USUAL, *slow(*OTHERS)])
def test_the_kernel_is_the_reference_and_stores_the_newest_token_on_the_way(
    dtype: torch.dtype, heads: int, window: int | None
) -> None:
    """Its key and value lie in wider rows, as those of a joint projection, and in the cache is still a NaN in their
    place."""
    pytest.importorskip("triton")
    from tinsmith.kernels.paged_attention import paged_kernel

    if dtype == torch.float32 and DEVICE == "cuda":
        pytest.skip("its products of float32 are less exact there: `paged_attention` does not use it")
    # A row alone is shared by more programs than one among many
    splits = [[530, *[7] * others] for others in amount((2,), (0, 2, 39))]
    for lengths in [*LENGTHS, *(splits if (dtype, heads, window) == USUAL[0] else [])]:
        cached = Cached(lengths, *SHAPES[heads], dtype)
        query = torch.stack([cached.query, cached.query], 1)[:, 0]  # rows that do not lie next to each other
        where = cached.keys, cached.values, cached.table, cached.lengths, SCALE, window
        with_sinks = paged_kernel(query, *where, sinks := torch.linspace(-3, 5, SHAPES[heads][0]).to(DEVICE, dtype))
        expected = cached.exact(window, sinks)
        torch.testing.assert_close(with_sinks.double(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        plain = paged_reference(query, *where, sinks)
        torch.testing.assert_close(plain.double(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        out = paged_kernel(query, *where)
        torch.testing.assert_close(out.double(), cached.exact(window), atol=BOUNDS[dtype], rtol=BOUNDS[dtype])

        _, kv_heads, head_dim = SHAPES[heads]
        width = kv_heads * head_dim
        wide = torch.zeros(len(lengths), 3 * width, dtype=dtype, device=DEVICE)
        key, value = (wide[:, first : first + width].unflatten(1, (kv_heads, head_dim)) for first in (width, 2 * width))
        keys, values = cached.keys.clone(), cached.values.clone()
        for row, length in enumerate(lengths):
            if length:
                place = int(cached.table[row, (length - 1) // BLOCK]), (length - 1) % BLOCK
                key[row], value[row] = keys[place], values[place]
                keys[place], values[place] = math.nan, math.nan
        found = paged_kernel(
            cached.query, keys, values, cached.table, cached.lengths, SCALE, window, newest=(key, value)
        )
        torch.testing.assert_close(found, out, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        assert torch.equal(keys.nan_to_num(9.0), cached.keys.nan_to_num(9.0))
        assert torch.equal(values.nan_to_num(9.0), cached.values.nan_to_num(9.0))


# Gated delta nets, on states in slots


SLOTS = 6
reference: Any = delta_step_reference


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def net(
    rows: int, seed: int = 0, key_dim: int = 16, value_dim: int = 24, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query, key, value, decay and beta of two heads of keys and four of values; the first three are parts of wider
    rows."""
    heads = (
        drawn(rows, 2, 2 * key_dim, seed=seed, dtype=dtype),
        drawn(rows, 4, value_dim + 3, seed=seed + 1, dtype=dtype),
    )
    query, key = heads[0].split(key_dim, 2)
    value = heads[1][..., :value_dim]
    return [
        query,
        key,
        value,
        -drawn(rows, 4, seed=seed + 2, dtype=dtype).abs(),
        drawn(rows, 4, seed=seed + 3, dtype=dtype).sigmoid(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("key_dim", "value_dim", "channels", "taps"), [(16, 24, 300, 4), (5, 3, 7, 2), *slow((128, 128, 300, 2))]
)
def test_the_kernels_are_the_references(
    dtype: torch.dtype, key_dim: int, value_dim: int, channels: int, taps: int
) -> None:
    """Slots that no row has stay as they are."""
    pytest.importorskip("triton")
    from tinsmith.kernels.delta_step import convolve_kernel, delta_kernel

    slots = torch.tensor([[3, 9], [0, 9], [5, 9]], device=DEVICE)[:, 0]  # a column of a wider table
    memory, earlier = (
        drawn(SLOTS, 4, key_dim, value_dim, dtype=torch.float32),
        drawn(SLOTS, taps - 1, channels, dtype=dtype),
    )
    memory[[1, 2, 4]] = earlier[[1, 2, 4]] = math.nan
    expected_memory, expected_earlier = memory.clone(), earlier.clone()
    weight = drawn(channels, taps, seed=5, dtype=dtype)
    for step in range(3):
        inputs = query, key, value, decay, beta = net(3, step * 10, key_dim, value_dim, dtype)
        out = delta_kernel(query, key, value, decay, beta, memory, slots)
        assert out.dtype == dtype
        expected = reference(*(x.float() for x in inputs), expected_memory, slots)
        torch.testing.assert_close(out.float(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        torch.testing.assert_close(memory, expected_memory, atol=1e-5, rtol=1e-5, equal_nan=True)
        x = drawn(3, channels + 2, seed=step + 10, dtype=dtype)[:, :channels]
        out, expected = (
            convolve_kernel(x, weight, earlier, slots.int()),
            convolve_step_reference(x, weight, expected_earlier, slots.int()),
        )
        torch.testing.assert_close(out, expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        torch.testing.assert_close(earlier, expected_earlier, atol=0, rtol=0, equal_nan=True)
