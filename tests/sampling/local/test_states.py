"""The slots of states: who has them, what is found again, and how many of them a budget holds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from tests.bases import load
from tinsmith.config import SamplingConfig
from tinsmith.errors import ConfigError
from tinsmith.models.layers import Attention, DeltaNet, layers_of
from tinsmith.sampling.local.cache_shape import CacheShape, CacheSizes
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.sampling.local.states import StateSlots, StateSteps

NET = DeltaNet(key_heads=1, value_heads=2, key_dim=4, value_dim=4, taps=4)
CPU = torch.device("cpu")
SHAPE = CacheShape((NET, NET, Attention(1, 2), NET), torch.float32, CPU)
A, B, C = b"a", b"b", b"c"
GIB = 2**30


def filled(states: StateSlots, slot: int, value: float) -> int:
    """Write that number all over a slot."""
    states.inputs[:, slot] = value
    states.memory[:, slot] = value
    return slot


def held(states: StateSlots, slot: int) -> set[float]:
    """The numbers in a slot."""
    return {*states.inputs[:, slot].flatten().tolist(), *states.memory[:, slot].flatten().tolist()}


def test_a_slot_that_is_taken_is_zero_or_a_copy_of_a_saved_state() -> None:
    states = StateSlots(SHAPE, 3)
    first = filled(states, states.take(None), 1.0)
    assert states.save(A, first)
    filled(states, first, float("nan"))
    states.give_back(first)
    second, third = states.take(None), states.take(A)
    assert (held(states, second), held(states, third)) == ({0.0}, {1.0})
    filled(states, third, 2.0)
    assert held(states, states.saved[A]) == {1.0}


def test_saved_states_used_least_recently_go_first() -> None:
    states = StateSlots(SHAPE, 4)
    own = filled(states, states.take(None), 1.0)
    for key in (A, B, C):
        assert states.save(key, own)
    assert not states.save(A, own)  # known, and used just now
    states.take(None)
    assert list(states.saved) == [C, A]
    states.take(C)
    assert list(states.saved) == [C]
    assert states.longest([A, B, C]) == 3
    assert states.longest([A, B]) == 0


def test_the_last_slot_that_is_left_goes_on_itself_and_nothing_is_saved_without_one() -> None:
    states = StateSlots(SHAPE, 2)
    own = filled(states, states.take(None), 1.0)
    assert states.save(A, own)
    other = states.take(A)
    assert (held(states, other), states.saved, states.available) == ({1.0}, {}, 0)
    assert not states.save(B, other)
    with pytest.raises(KeyError):
        states.take(None)
    states.give_back(own)
    assert states.save(B, other)
    states.forget(B)
    states.forget(A)
    assert states.free == [own]


def test_a_pass_changes_no_slot_before_it_is_committed_and_then_only_its_own() -> None:
    states = StateSlots(SHAPE, 3)
    slots = [filled(states, states.take(None), float(number)) for number in range(3)]
    steps = StateSteps(states, torch.tensor([slots[2], slots[0]]), [3, 1])
    for layer in SHAPE.delta_layers:
        steps.convolve(layer, torch.ones(4, NET.channels), torch.ones(NET.channels, NET.taps))
        query, value = torch.ones(4, 1, 4), torch.ones(4, 2, 4)
        steps.delta_rule(layer, query, query, value, torch.zeros(4, 2), torch.ones(4, 2))
    assert [held(states, slot) for slot in slots] == [{0.0}, {1.0}, {2.0}]
    steps.commit()
    assert held(states, slots[1]) == {1.0}
    assert states.inputs[:, slots[2]].eq(1.0).all()
    assert states.inputs[:, slots[0]].flatten(0, 0)[:, :, 0].tolist() == [[0.0, 0.0, 1.0]] * 3
    assert not states.memory[:, slots[0]].eq(0.0).any()


def qwen3_5_4b() -> CacheShape:
    """What Qwen3.5-4B keeps of a sequence."""
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
    widths = {"hidden_size": 2560, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    config = AutoConfig.for_model("qwen3_5_text", num_hidden_layers=32, **heads, **widths)
    return CacheShape(layers_of("test", "qwen3_5_text", config), torch.bfloat16, CPU)


def test_a_budget_is_divided_between_blocks_and_slots_and_no_more_slots_than_places_need() -> None:
    shape = qwen3_5_4b()
    assert shape.state_bytes == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)  # 49.1 MiB
    assert shape.block_bytes == 16 * 8 * 2 * 4 * 256 * 2  # half a MiB
    sizes = shape.divide(2 * GIB, max_running=256)
    assert sizes.slots == GIB // shape.state_bytes == 20
    assert sizes.places == 18
    assert 0 <= 2 * GIB - sizes.slots * shape.state_bytes - sizes.blocks * shape.block_bytes < shape.block_bytes
    for max_running in (1, 2, 3, 4, 7, 256):
        sizes = shape.divide(200 * GIB, max_running)
        assert sizes.places >= max_running
        assert sizes.slots == max_running + -(-max_running // 7)
    blocks_only = CacheShape((Attention(2, 32),) * 2, torch.float32, CPU)
    assert blocks_only.divide(10 * blocks_only.block_bytes + 1, 256) == CacheSizes(blocks=10, slots=0)


def test_a_budget_that_holds_no_sequence_is_refused_with_its_remedy_and_layers_of_different_sizes() -> None:
    shape = qwen3_5_4b()
    with pytest.raises(
        ConfigError, match=r"kv_cache_gib=0.04 does not hold .* state takes 0.048 GiB .* --kv-cache-gib 0.384, which holds four"
    ):
        shape.divide(int(0.04 * GIB), 256)
    assert shape.divide(int(0.384 * GIB), 256).slots == 4
    assert shape.divide(shape.state_bytes + shape.block_bytes, 256) == CacheSizes(blocks=1, slots=1)
    with pytest.raises(ConfigError, match=r"needs layers of equal sizes, and these differ: .*head_dim=2.*head_dim=4"):
        CacheShape((Attention(1, 2), Attention(1, 4)), torch.float32, CPU).divide(GIB, 1)


def test_the_cache_takes_the_memory_that_it_was_given(family_dir: Callable[[str], Path]) -> None:
    """But for block 0 and the last slot, which are scratch."""
    base = load(family_dir("qwen3_5"), device="cpu")
    sampler = LocalSampler(base, SamplingConfig(kv_cache_gib=0.004), 16)
    assert sampler.states is not None
    spare = sampler.cache.keys[:, :1].nbytes * 2
    states = sampler.states.inputs[:, :-1].nbytes + sampler.states.memory[:, :-1].nbytes
    taken = sampler.cache.keys.nbytes + sampler.cache.values.nbytes + states - spare
    assert 0 <= 0.004 * GIB - taken < spare
    assert sampler.states.total == int(0.002 * GIB) // (3 * (4 * 16 * 16 * 4 + 3 * 128 * 4)) == 127
    assert sampler.capacity() == f"{sampler.cache.total * 16:,} tokens and 127 states of sequences, of which 112 run at once"
