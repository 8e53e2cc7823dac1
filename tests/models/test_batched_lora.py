"""LoRA in a decode batch: kernels that compute each row as if its adapter were alone, and the columns that adapters
get.

That rows of a batch have the numbers of the trainer: tests/sampling/local/test_sampler.py.

On a CPU the kernels run in Triton's interpreter, which knows no bfloat16; on CUDA they run as they are.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.bases import DEVICE
from tests.counted_memory import CountedMemory
from tinsmith.errors import UserError
from tinsmith.models.batched_lora import FEWEST, OUTPUTS, BatchedAdapters, output_tiles
from tinsmith.models.layout import Layout, read_layout
from tinsmith.models.lora import LORA_ALPHA, Adapter, new_adapter
from tinsmith.protocol.shapes import LoraShape

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUND = 3e-2 if DEVICE == "cuda" else 4e-3


@pytest.fixture(scope="module")
def layout(family_dir: Callable[[str], Path]) -> Layout:
    """Of a tiny model with attention and gated delta nets."""
    return read_layout(str(family_dir("qwen3_5")))


def random_adapter(layout: Layout, rank: int, dtype: torch.dtype = torch.float32, **switches: bool) -> Adapter:
    adapter = new_adapter(LoraShape(rank=rank, seed=rank, **switches), layout, torch.device(DEVICE), dtype)
    generator = torch.Generator().manual_seed(rank)
    adapter.flat.copy_(torch.randn(adapter.flat.shape, generator=generator) * 0.1)
    adapter.refresh()
    return adapter


@pytest.mark.parametrize(("count", "inputs", "targets"), [(5, 600, [(0, 64), (64, 80), (90, 95)]), (70, 48, [(3, 40)])])
def test_the_kernels_are_the_formula(count: int, inputs: int, targets: list[tuple[int, int]]) -> None:
    """Some rows have no columns.

    Matrices of NaN that no row of a tile needs are not read, and a row of NaN reaches no other.
    """
    pytest.importorskip("triton")
    from tinsmith.kernels.lora import add_adapters

    generator = torch.Generator().manual_seed(count)
    width, out = 96, targets[-1][1] + 2
    x, a, b, y = (
        (torch.randn(size, generator=generator) * 0.2).to(DEVICE, HALF)
        for size in ((count, inputs), (len(targets), width, inputs), (out, width), (count, out))
    )
    a[:, 64:] = b[:, 64:] = math.nan
    columns = torch.tensor([[0, 0], [3, 40], [40, 45], [0, 3], [45, 64]], dtype=torch.int32)[
        torch.arange(1, count + 1) % 5
    ].to(DEVICE)
    expected = y.double()
    for row, (start, end) in enumerate(columns.tolist()):
        for number, (first, last) in enumerate(targets):
            own = x[row].double() @ a[number, start:end].double().t() @ b[first:last, start:end].double().t()
            expected[row, first:last] += own * 32 / max(end - start, 1)
    x[-1, 0] = math.nan
    add_adapters(y, x, columns, a, b, output_tiles(targets, torch.device(DEVICE)), OUTPUTS, LORA_ALPHA)
    torch.testing.assert_close(y[:-1].double(), expected[:-1], atol=5 * BOUND, rtol=BOUND)


def test_an_adapter_that_is_not_finite_gets_no_columns(layout: Layout) -> None:
    batched, adapter = BatchedAdapters(layout, torch.device(DEVICE), torch.float32, 64), random_adapter(layout, 4)
    adapter.flat[7] = math.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        batched.place(adapter)
    assert batched.columns == 0


def test_columns_that_find_no_memory_leave_the_others_as_they_are(layout: Layout) -> None:
    """Captured graphs go on reading them.

    All buffers are made anew for more columns; the memory ends among the last of them.
    """
    batched = BatchedAdapters(layout, torch.device(DEVICE), torch.float32, 64)
    first, large = random_adapter(layout, 8), random_adapter(layout, 40)
    assert batched.place(first) == (0, 8)
    before = dict(batched.matrices)
    needed = 2 * sum(matrices.a.nbytes + matrices.b.nbytes for matrices in before.values())
    with CountedMemory(limit=0.9 * needed) as memory, pytest.raises(torch.OutOfMemoryError):
        batched.place(large)
    assert memory.peak > 0.5 * needed
    assert (batched.matrices, batched.columns, batched.generation) == (before, FEWEST, 1)
    assert batched.place(first) == (0, 8)
    assert batched.place(large) == (8, 48)
    assert batched.columns == 64


def test_columns_are_given_once_and_given_again(layout: Layout) -> None:
    batched = BatchedAdapters(layout, torch.device(DEVICE), torch.float32, 40)
    first, second, third, fourth = (random_adapter(layout, rank) for rank in (16, 12, 20, 30))
    assert [batched.place(adapter) for adapter in (first, first, second)] == [(0, 16), (0, 16), (16, 28)]
    assert (batched.columns, batched.generation) == (FEWEST, 1)
    assert [batched.place(adapter) for adapter in (fourth, third)] == [None, None]  # the third would end at 48
    batched.forget(first)
    batched.forget(first)
    assert batched.place(third) is None  # 16 are free before the second, and 12 behind it
    batched.forget(second)
    assert [batched.place(adapter) for adapter in (third, first)] == [(0, 20), (20, 36)]
    assert (batched.columns, batched.generation) == (64, 2)
