"""How a budget of memory is divided between keys and values and states, and that the cache takes no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoConfig

from tests.bases import load
from tinsmith.config import SamplingConfig
from tinsmith.errors import ConfigError
from tinsmith.memory.budget import CacheShape, CacheSizes
from tinsmith.models.layers import Attention, layers_of
from tinsmith.sampling.local.sampler import LocalSampler

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture(scope="module")
def qwen3_5_4b() -> CacheShape:
    """What Qwen3.5-4B keeps of a sequence."""
    heads: dict[str, Any] = {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    }
    widths = {
        "hidden_size": 2560,
        "head_dim": 256,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    }
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=32, **heads, **widths)
    return CacheShape(layers_of("test", "qwen3_5_text", config), torch.bfloat16, CPU)


def test_a_budget_is_divided_between_blocks_and_slots_and_no_more_slots_than_places_need(
    qwen3_5_4b: CacheShape,
) -> None:
    assert qwen3_5_4b.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # 49.1 MiB
    assert qwen3_5_4b.block_bytes == 16 * 8 * 2 * 4 * 256 * 2  # half a MiB
    sizes = qwen3_5_4b.divide(2 * GIB, max_running=256)
    assert (sizes.slots, sizes.places) == (GIB // qwen3_5_4b.state_bytes, 18) == (20, 18)
    assert (
        0
        <= 2 * GIB - sizes.slots * qwen3_5_4b.state_bytes - sizes.blocks * qwen3_5_4b.block_bytes
        < qwen3_5_4b.block_bytes
    )
    for max_running in (1, 2, 3, 4, 7, 256):
        sizes = qwen3_5_4b.divide(200 * GIB, max_running)
        assert sizes.places >= max_running
        assert sizes.slots == max_running + -(-max_running // 7)
    blocks_only = CacheShape((Attention(2, 32),) * 2, torch.float32, CPU)
    assert blocks_only.divide(10 * blocks_only.block_bytes + 1, 256) == CacheSizes(blocks=10, slots=0)


def test_a_budget_that_holds_no_sequence_is_refused_with_its_remedy_and_layers_of_different_sizes(
    qwen3_5_4b: CacheShape,
) -> None:
    with pytest.raises(
        ConfigError, match=r"=0.04 does not hold .* state takes 0.048 GiB .* --kv-cache-gib 0.384, which holds four"
    ):
        qwen3_5_4b.divide(int(0.04 * GIB), 256)
    assert qwen3_5_4b.divide(int(0.384 * GIB), 256).slots == 4
    assert qwen3_5_4b.divide(qwen3_5_4b.state_bytes + qwen3_5_4b.block_bytes, 256) == CacheSizes(blocks=1, slots=1)
    with pytest.raises(ConfigError, match=r"needs layers of equal sizes, and these differ: .*head_dim=2.*head_dim=4"):
        CacheShape((Attention(1, 2), Attention(1, 4)), torch.float32, CPU).divide(GIB, 1)


def test_the_cache_takes_the_memory_that_it_was_given_and_on_a_cpu_only_as_it_is_used(
    family_dir: Callable[[str], Path],
) -> None:
    """But for block 0 and the last slot, which are scratch.

    A server with three tiny models would hold gigabytes that nobody needs.
    """
    sampler = LocalSampler(load(family_dir("qwen3_5"), device="cpu"), SamplingConfig(kv_cache_gib=0.004), 16)
    assert sampler.states is not None
    spare = sampler.cache.keys[:, :1].nbytes * 2
    states = sampler.states.inputs[:, :-1].nbytes + sampler.states.memory[:, :-1].nbytes
    taken = sampler.cache.keys.nbytes + sampler.cache.values.nbytes + states - spare
    assert 0 <= 0.004 * GIB - taken < spare
    assert sampler.states.total == int(0.002 * GIB) // (3 * (4 * 16 * 16 * 4 + 3 * 128 * 4)) == 127
    assert (
        sampler.capacity()
        == f"{sampler.cache.total * 16:,} tokens and 127 states of sequences, of which 112 run at once"
    )
    before = psutil.Process().memory_info().rss
    large = LocalSampler(sampler.base, SamplingConfig(kv_cache_gib=1.0), 16)
    assert large.states is not None
    for reserved in (large.cache.keys, large.cache.values, large.states.inputs, large.states.memory):
        last = reserved.view(-1)[-2:]
        last[1] = 1
        assert last.tolist() == [0, 1]
    assert psutil.Process().memory_info().rss - before < GIB / 16
