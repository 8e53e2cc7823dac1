"""Gated delta nets token by token, on states in slots: the references against whole sequences, the kernels against the references.

On a CPU the kernels run in Triton's interpreter, which knows no bfloat16; on CUDA they run as they are.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models.delta_rule import Lengths, convolve, gated_delta_rule
from tinsmith.sampling.local.delta_step import convolve_step, convolve_step_reference, delta_step, delta_step_reference

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SLOTS, TOKENS = 6, 9

ours: Callable[..., Tensor] = delta_step
reference: Callable[..., Tensor] = delta_step_reference


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def net(rows: int, seed: int = 0, key_dim: int = 16, value_dim: int = 24, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, decay and beta of two heads of keys and four of values; the first three are parts of wider rows."""
    heads = drawn(rows, 2, 2 * key_dim, seed=seed, dtype=dtype), drawn(rows, 4, value_dim + 3, seed=seed + 1, dtype=dtype)
    query, key = heads[0].split(key_dim, 2)
    value = heads[1][..., :value_dim]
    return [query, key, value, -drawn(rows, 4, seed=seed + 2, dtype=dtype).abs(), drawn(rows, 4, seed=seed + 3, dtype=dtype).sigmoid()]


def stepped(shape: tuple[int, ...], slots: Tensor, step: Callable[[list[int], Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What steps through two sequences give in all, and what is left in their slots. In all other slots is NaN, and stays there."""
    memory = torch.full((SLOTS, *shape), math.nan, dtype=torch.float64, device=DEVICE)
    memory[slots.long()] = 0
    outs = [step([t, TOKENS + t], memory) for t in range(TOKENS)]
    assert memory.isnan().flatten(1).all(1).sum() == SLOTS - 2
    return torch.stack(outs, 1).flatten(0, 1), memory[slots.long()]


def test_steps_give_what_the_whole_sequence_gives() -> None:
    inputs = query, key, value, decay, beta = net(2 * TOKENS)
    slots = torch.tensor([4, 2], device=DEVICE)
    out, memory = stepped((4, 16, 24), slots, lambda at, memory: reference(*(x[at] for x in inputs), memory, slots))
    whole, after = gated_delta_rule(query, key, value, decay, beta, Lengths((TOKENS, TOKENS)), None)
    torch.testing.assert_close(out, whole, atol=1e-10, rtol=0)
    torch.testing.assert_close(memory, after, atol=1e-10, rtol=0)
    x, weight, slots = drawn(2 * TOKENS, 10), drawn(10, 4, seed=1), slots.int()
    out, earlier = stepped((3, 10), slots, lambda at, earlier: convolve_step_reference(x[at], weight, earlier, slots))
    whole, after = convolve(x, weight, Lengths((TOKENS, TOKENS)), None)
    torch.testing.assert_close(out, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(earlier, after, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 24), (128, 128), (5, 3)])
def test_the_kernel_of_the_delta_rule_is_the_reference(dtype: torch.dtype, key_dim: int, value_dim: int) -> None:
    pytest.importorskip("triton")
    from tinsmith.sampling.local.delta_step_kernels import delta_kernel

    slots = torch.tensor([[3, 9], [0, 9], [5, 9]], device=DEVICE)[:, 0]  # a column of a wider table
    memory = drawn(SLOTS, 4, key_dim, value_dim, dtype=torch.float32)
    memory[[1, 2, 4]] = math.nan
    expected_memory = memory.clone()
    for step in range(2):
        inputs = net(3, step * 10, key_dim, value_dim, dtype)
        query, key, value, decay, beta = inputs
        out = delta_kernel(query, key, value, decay, beta, memory, slots)
        expected = reference(*(x.float() for x in inputs), expected_memory, slots)
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        torch.testing.assert_close(memory, expected_memory, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("channels", "taps"), [(300, 4), (7, 2)])
def test_the_kernel_of_the_convolution_is_the_reference(dtype: torch.dtype, channels: int, taps: int) -> None:
    pytest.importorskip("triton")
    from tinsmith.sampling.local.delta_step_kernels import convolve_kernel

    slots = torch.tensor([3, 0, 5], dtype=torch.int32, device=DEVICE)
    weight = drawn(channels, taps, seed=5, dtype=dtype)
    earlier = drawn(SLOTS, taps - 1, channels, dtype=dtype)
    earlier[[1, 2, 4]] = math.nan
    expected_earlier = earlier.clone()
    for step in range(3):
        x = drawn(3, channels + 2, seed=step + 10, dtype=dtype)[:, :channels]
        out = convolve_kernel(x, weight, earlier, slots)
        expected = convolve_step_reference(x, weight, expected_earlier, slots)
        torch.testing.assert_close(out, expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        torch.testing.assert_close(earlier, expected_earlier, atol=0, rtol=0, equal_nan=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU captures no graphs")
@pytest.mark.parametrize("step", [delta_step, delta_step_reference])
def test_a_captured_step_reads_slots_and_states_anew(step: Callable[..., Tensor]) -> None:
    inputs = net(2, dtype=HALF)
    memory, slots = drawn(SLOTS, 4, 16, 24, dtype=torch.float32), torch.tensor([0, 1], device=DEVICE)
    step(*inputs, memory, slots)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(*inputs, memory, slots)
    slots.copy_(torch.tensor([4, 2], device=DEVICE))
    expected_memory = memory.clone()
    expected = reference(*inputs, expected_memory, slots)
    graph.replay()
    torch.testing.assert_close(out, expected, atol=BOUNDS[HALF], rtol=BOUNDS[HALF])
    torch.testing.assert_close(memory, expected_memory, atol=1e-4, rtol=1e-4)


def test_rows_may_share_a_slot_that_nobody_waits_for() -> None:
    inputs = net(4, dtype=torch.float32)
    memory, slots = drawn(SLOTS, 4, 16, 24, dtype=torch.float32), torch.tensor([2, 0, 0, 0], device=DEVICE)
    expected_memory = memory.clone()
    expected = ours(*(x[:1] for x in inputs), expected_memory, slots[:1])
    out = ours(*inputs, memory, slots)
    torch.testing.assert_close(out[:1], expected, atol=0, rtol=0)
    torch.testing.assert_close(memory[2], expected_memory[2], atol=0, rtol=0)
    weight, earlier = drawn(10, 4, dtype=torch.float32), drawn(SLOTS, 3, 10, dtype=torch.float32)
    x = drawn(4, 10, dtype=torch.float32)
    kept = earlier.clone()
    torch.testing.assert_close(convolve_step(x, weight, earlier, slots)[:1], convolve_step(x[:1], weight, kept, slots[:1]))
    torch.testing.assert_close(earlier[2], kept[2], atol=0, rtol=0)
