"""The cache's blocks: who uses them, and what is found again."""

import psutil
import pytest
import torch

from tinsmith.models.layers import Attention
from tinsmith.sampling.local.cache_shape import CacheShape
from tinsmith.sampling.local.kv_cache import KVCache
from tinsmith.sampling.prefix import BLOCK

SHAPE = CacheShape((Attention(kv_heads=1, head_dim=2),), torch.float32, torch.device("cpu"))
A, B, C = b"a", b"b", b"c"


@pytest.fixture
def two() -> tuple[KVCache, list[int], list[int]]:
    """A cache of two blocks, both in use."""
    cache = KVCache(SHAPE, 2)
    return cache, cache.take(1), cache.take(1)


def test_what_nobody_uses_is_found_until_its_room_is_needed() -> None:
    cache = KVCache(SHAPE, 4)
    blocks = cache.take(3)
    cache.remember([A, B, C], blocks)
    cache.give_back(blocks)
    assert (len(cache.free), cache.available) == (1, 4)
    assert cache.find([A, B, C]) == blocks
    cache.take(2)  # the free one, and the end of what is known
    assert cache.find([A, B, C]) == blocks[:2]
    assert cache.find([B]) == [blocks[1]]
    assert cache.find([C, A]) == []


def test_a_shared_block_stays_while_one_sequence_needs_it(two: tuple[KVCache, list[int], list[int]]) -> None:
    cache, blocks, other = two
    cache.remember([A], blocks)
    cache.give_back(other)
    cache.give_back(blocks)
    assert cache.share(cache.find([A])[0]) == blocks[0]
    assert cache.available == 1
    cache.take(1)
    assert cache.find([A]) == blocks
    cache.give_back(blocks)
    assert cache.available == 1


def test_a_key_stays_with_its_block_and_a_taken_block_is_cleared_but_no_copy(two: tuple[KVCache, list[int], list[int]]) -> None:
    cache, first, second = two
    for blocks in (first, second):
        cache.remember([A], blocks)
    assert cache.find([A]) == first
    cache.keys[:, first] = float("nan")
    cache.give_back(first)
    cache.give_back(second)
    block, other = cache.take(2)
    assert cache.find([A]) == []
    cache.clean()
    assert cache.keys.isfinite().all()
    cache.give_back([other])
    cache.keys[:, block] = 3.0
    copied = cache.copy(block)
    cache.clean()
    assert cache.keys[:, [block, copied]].eq(3.0).all()


def test_blocks_used_least_recently_go_first(two: tuple[KVCache, list[int], list[int]]) -> None:
    cache, first, second = two
    for key, blocks in ((A, first), (B, second)):
        cache.remember([key], blocks)
        cache.give_back(blocks)
    cache.give_back([cache.share(cache.find([A])[0])])
    cache.take(1)
    assert (cache.find([A]), cache.find([B])) == (first, [])


def test_on_a_cpu_memory_is_taken_as_it_is_used() -> None:
    """A server with three tiny models would otherwise hold gigabytes that nobody needs."""
    shape = CacheShape((Attention(kv_heads=8, head_dim=128),), torch.bfloat16, torch.device("cpu"))
    process = psutil.Process()
    before = process.memory_info().rss
    cache = KVCache(shape, 2**30 // (2 * 2 * BLOCK * 8 * 128))  # keys and values of 2 bytes: a gigabyte
    assert cache.keys.nbytes + cache.values.nbytes > 2**30
    cache.values[0, -1] = 1
    assert (cache.keys[0, -1].abs().max().item(), cache.values[0, -1].min().item()) == (0, 1)
    assert process.memory_info().rss - before < 2**29
