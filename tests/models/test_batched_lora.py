"""LoRA in a decode batch: each row as if its adapter were alone, in the reference and in the kernels.

On a CPU the kernels run in Triton's interpreter, which knows no bfloat16; on CUDA they run as they are.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tests.counted_memory import CountedMemory
from tinsmith.errors import UserError
from tinsmith.models.batched_lora import FEWEST, BatchedAdapters, output_tiles
from tinsmith.models.joined_linear import JoinedLinear, WeightPiece
from tinsmith.models.layout import Layout, read_layout
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.protocol.shapes import LoraShape

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


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


class Plain(JoinedLinear):
    """The layers of one projection."""

    def exact(self, x: Tensor, owners: Sequence[Adapter | None]) -> Tensor:
        """Row by row in float64."""
        y = x.double() @ self.weight.double().t()
        for row, adapter in enumerate(owners):
            for name, (start, end) in self.projection.targets.items():
                if adapter is not None and name in adapter.working:
                    a, b = (matrix.detach().double() for matrix in adapter.working[name])
                    y[row, start:end] += adapter.scale * (b @ (a @ x[row].double()))
        return y


def plain_layers(layout: Layout, dtype: torch.dtype) -> Iterator[Plain]:
    generator = torch.Generator().manual_seed(0)
    for projection in layout.projections.values():
        if projection.targets:
            rows = (0, projection.out_features)
            weight = (torch.randn(projection.out_features, projection.in_features, generator=generator) * 0.1).to(DEVICE, dtype)
            yield Plain(projection, (rows,), (WeightPiece(rows, weight, None),))


def columns_of(batched: BatchedAdapters, owners: Sequence[Adapter | None]) -> Tensor:
    return torch.tensor([(0, 0) if owner is None else batched.place(owner) for owner in owners], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_each_row_has_its_own_adapter_and_keeps_its_nan(layout: Layout, dtype: torch.dtype) -> None:
    batched = BatchedAdapters(layout, torch.device(DEVICE), dtype, 128)
    adapters = [random_adapter(layout, 5, dtype), random_adapter(layout, 33, dtype, train_attn=False), random_adapter(layout, 8, dtype)]
    owners = [adapters[0], None, adapters[1], adapters[2], adapters[0], None, adapters[1]]
    rows = batched.for_rows(columns_of(batched, owners))
    generator = torch.Generator().manual_seed(1)
    for plain in plain_layers(layout, dtype):
        x = torch.randn(len(owners), plain.projection.in_features, generator=generator).to(DEVICE, dtype)
        found = rows.apply(plain, x)
        torch.testing.assert_close(found.double(), plain.exact(x, owners), atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        x[0, 0] = math.nan
        sick = rows.apply(plain, x)
        assert sick[0].isnan().any()
        assert torch.equal(sick[1:], found[1:])


@pytest.mark.parametrize(("count", "inputs", "targets"), [(5, 600, [(0, 64), (64, 80), (90, 95)]), (70, 48, [(3, 40)])])
def test_the_kernels_are_the_formula(count: int, inputs: int, targets: list[tuple[int, int]]) -> None:
    """Some rows have no columns. Matrices of NaN that no row of a tile needs are not read."""
    pytest.importorskip("triton")
    from tinsmith.models.lora_kernels import add_adapters

    generator = torch.Generator().manual_seed(count)
    width, out = 96, targets[-1][1] + 2
    x, a, b, y = (
        (torch.randn(size, generator=generator) * 0.2).to(DEVICE, HALF)
        for size in ((count, inputs), (len(targets), width, inputs), (out, width), (count, out))
    )
    a[:, 64:] = b[:, 64:] = math.nan
    columns = torch.tensor([[0, 0], [3, 40], [40, 45], [0, 3], [45, 64]], dtype=torch.int32)[torch.arange(1, count + 1) % 5].to(DEVICE)
    expected = y.double()
    for row, (start, end) in enumerate(columns.tolist()):
        for number, (first, last) in enumerate(targets):
            own = x[row].double() @ a[number, start:end].double().t() @ b[first:last, start:end].double().t()
            expected[row, first:last] += own * 32 / max(end - start, 1)
    add_adapters(y, x, columns, a, b, output_tiles(targets, torch.device(DEVICE)))
    torch.testing.assert_close(y.double(), expected, atol=5 * BOUNDS[HALF], rtol=BOUNDS[HALF])


def test_an_adapter_that_is_not_finite_gets_no_columns(layout: Layout) -> None:
    batched, adapter = BatchedAdapters(layout, torch.device(DEVICE), torch.float32, 64), random_adapter(layout, 4)
    adapter.flat[7] = math.nan
    with pytest.raises(UserError, match="NaN or infinite"):
        batched.place(adapter)
    assert batched.columns == 0


def test_columns_that_find_no_memory_leave_the_others_as_they_are(layout: Layout) -> None:
    """Captured graphs go on reading them. All buffers are made anew for more columns; the memory ends among the last of them."""
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
