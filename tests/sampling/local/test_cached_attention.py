"""Attention to what is cached, against attention over the whole sequence."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tinsmith.models.layers import Attention
from tinsmith.sampling.local.cache_shape import CacheShape
from tinsmith.sampling.local.cached_attention import NARROW, CachedPlan, Window, group_similar
from tinsmith.sampling.local.kv_cache import KVCache, blocks_for

HEADS, KV_HEADS, HEAD_DIM, SCALE = 4, 2, 8, 0.3


def test_a_long_sequence_does_not_widen_the_short_ones() -> None:
    blocks = [1, NARROW, 2000, 3, 1025, NARROW + 1, 1024]
    windows = [(i, Window([0] * count, 5, 6)) for i, count in enumerate(blocks)]
    assert [[i for i, _ in group] for group in group_similar(windows)] == [[0, 1, 3], [2, 4], [5], [6]]


def test_single_tokens_are_apart_from_wider_windows() -> None:
    windows = [(0, Window([1], 5, 6)), (1, Window([2], 5, 8)), (2, Window([3], 5, 6)), (3, Window([4], 5, 12))]
    assert [[i for i, _ in group] for group in group_similar(windows)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("window", [None, 5])
def test_pieces_give_what_the_whole_gives(window: int | None) -> None:
    """Three sequences go through several rows of fresh and continued windows of all widths."""
    torch.manual_seed(0)
    lengths = [23, 70, 9]
    cuts = [[0, 20, 21, 22, 23], [0, 1, 30, 33, 70], [0, 4, 5, 6, 9]]
    cache = KVCache(CacheShape((Attention(KV_HEADS, HEAD_DIM),), torch.float32, torch.device("cpu")), 20)
    blocks = [cache.take(blocks_for(n)) for n in lengths]
    query, key, value = ([torch.randn(n, h, HEAD_DIM) for n in lengths] for h in (HEADS, KV_HEADS, KV_HEADS))
    parts: list[list[torch.Tensor]] = [[], [], []]
    for step in range(4):
        windows = [Window(own[: blocks_for(cut[step + 1])], cut[step], cut[step + 1]) for own, cut in zip(blocks, cuts, strict=True)]
        q, k, v = (torch.cat([x[w.start : w.end] for x, w in zip(xs, windows, strict=True)]) for xs in (query, key, value))
        out = CachedPlan(cache, windows).attend(0, q, k, v, SCALE, window)
        for own, piece in zip(parts, out.split([len(w) for w in windows]), strict=True):
            own.append(piece)
    for q, k, v, pieces, length in zip(query, key, value, parts, lengths, strict=True):
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = causal if window is None else causal & torch.ones(length, length, dtype=torch.bool).triu(1 - window)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)[0]
        torch.testing.assert_close(torch.cat(pieces), expected.transpose(0, 1), atol=1e-5, rtol=0)
