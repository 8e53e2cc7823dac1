"""Attention to what is cached, against attention over the whole sequence."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.bases import DEVICE
from tinsmith.models.attention import continued_attention
from tinsmith.models.layers import Attention
from tinsmith.sampling.local.cache_shape import CacheShape
from tinsmith.sampling.local.cached_attention import CachedPlan, ContinuedWindows, Window
from tinsmith.sampling.local.kv_cache import KVCache, blocks_for
from tinsmith.sampling.prefix import BLOCK

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("window", [None, 5])
def test_pieces_give_what_the_whole_gives(window: int | None, dtype: torch.dtype) -> None:
    """Three sequences go through several rows of fresh and continued windows of all widths."""
    generator = torch.Generator().manual_seed(0)
    lengths = [23, 70, 9]
    cuts = [[0, 20, 21, 22, 23], [0, 1, 30, 33, 70], [0, 4, 5, 6, 9]]
    cache = KVCache(CacheShape((Attention(KV_HEADS, HEAD_DIM),), dtype, torch.device(DEVICE)), 20)
    blocks = [cache.take(blocks_for(n)) for n in lengths]
    query, key, value = (
        [torch.randn(n, h, HEAD_DIM, generator=generator).to(DEVICE, dtype) for n in lengths] for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    parts: list[list[torch.Tensor]] = [[], [], []]
    for step in range(4):
        windows = [Window(own[: blocks_for(cut[step + 1])], cut[step], cut[step + 1]) for own, cut in zip(blocks, cuts, strict=True)]
        q, k, v = (torch.cat([x[w.start : w.end] for x, w in zip(xs, windows, strict=True)]) for xs in (query, key, value))
        out = CachedPlan(cache, windows).attend(0, q, k, v, SCALE, window)
        for own, piece in zip(parts, out.split([len(w) for w in windows]), strict=True):
            own.append(piece)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for q, k, v, pieces, length in zip(query, key, value, parts, lengths, strict=True):
        expected = whole(q.double(), k.double(), v.double(), length, window)
        torch.testing.assert_close(torch.cat(pieces).double(), expected, atol=bound, rtol=0)


def whole(query: Tensor, key: Tensor, value: Tensor, last: int, window: int | None) -> Tensor:
    """Attention of the last queries to all keys, or the last `window` of them; shapes as in `PassPlan.attend`."""
    length = len(key)
    ones = torch.ones(length, length, dtype=torch.bool, device=key.device)
    mask = (ones.tril() if window is None else ones.tril() & ones.triu(1 - window))[length - last :]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)


def test_continued_windows_see_their_own_tokens_alone() -> None:
    """What the variable-length kernel is called with; NaN is where a window must not look."""
    tokens, blocks = {4: 37, 9: 16, 2: 1}, {4: [3, 1, 7], 9: [5], 2: [4]}  # by width of the last window
    memory = torch.full((9, BLOCK, KV_HEADS, HEAD_DIM), torch.nan, device=DEVICE)
    parts = []
    for width, length in tokens.items():
        own = torch.full((len(blocks[width]) * BLOCK, KV_HEADS, HEAD_DIM), torch.nan, device=DEVICE)
        own[:length] = torch.randn(length, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(width)).to(DEVICE)
        memory[blocks[width]] = own.view(-1, *memory.shape[1:])
        parts.append(own[:length])
    windows = [Window(blocks[4], 33, 37), Window(blocks[9], 7, 16), Window(blocks[2], 0, 1)]
    continued = ContinuedWindows([10, 0, 30], windows, torch.device(DEVICE))
    assert continued.rows.tolist() == [*range(10, 14), *range(9), 30]
    assert (continued.cu_query.tolist(), continued.cu_key.tolist(), continued.longest) == ([0, 4, 13, 14], [0, 37, 53, 54], (9, 37))
    torch.testing.assert_close(continued.gather(memory), torch.cat(parts), atol=0, rtol=0)


@pytest.mark.skipif(DEVICE == "cpu", reason="the kernel runs on CUDA only")
@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_last_queries_see_what_they_would_in_the_whole(head_dim: int, window: int | None) -> None:
    widths, lengths = [1, 70, 200], [5, 300, 200]
    query, key, value = (
        torch.randn(sum(sizes), heads, head_dim, generator=torch.Generator().manual_seed(heads)).to(DEVICE, torch.bfloat16)
        for sizes, heads in ((widths, 8), (lengths, 2), (lengths, 2))
    )
    cu_query, cu_key = (torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=DEVICE) for sizes in (widths, lengths))
    out = continued_attention(query, key, value, cu_query, cu_key, (max(widths), max(lengths)), SCALE, window)
    pieces = zip(out.split(widths), query.split(widths), key.split(lengths), value.split(lengths), widths, strict=True)
    for got, q, k, v, width in pieces:
        torch.testing.assert_close(got.double(), whole(q.double(), k.double(), v.double(), width, window), atol=2e-2, rtol=2e-2)
