"""Attention to the cache's blocks: the reference against plain formulas, and the kernel against the reference.

On a CPU the kernel runs in Triton's interpreter, which knows no bfloat16; on CUDA it runs as it is.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tests.extent import slow
from tinsmith.sampling.local.kv_cache import blocks_for
from tinsmith.sampling.local.paged_attention import paged_attention, paged_reference
from tinsmith.sampling.prefix import BLOCK

SCALE = 0.3
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Cached:
    """Rows of random length with keys and values in scattered blocks. All else is NaN: other blocks, and places behind a row's length."""

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
        blocks = torch.full((self.table.numel() + 1, BLOCK, *memory.shape[2:]), math.nan, dtype=memory.dtype, device=DEVICE)
        blocks[self.table.flatten().long()] = memory.view(-1, *blocks.shape[1:])
        return blocks

    def exact(self, window: int | None) -> Tensor:
        """The formula in float64, row by row."""
        out = torch.zeros(self.query.shape, dtype=torch.float64, device=DEVICE)
        groups = self.query.shape[1] // self.keys.shape[2]
        for row, length in enumerate(self.lengths.tolist()):
            first = 0 if window is None else max(0, length - window)
            if length:
                k, v = (memory[row, first:length].double().repeat_interleave(groups, 1) for memory in self.of_rows)
                weights = (torch.einsum("hd,nhd->hn", self.query[row].double(), k) * SCALE).softmax(-1)
                out[row] = torch.einsum("hn,nhd->hd", weights, v)
        return out


LENGTHS = [[1], [0, 5, 0], [16, 17, 15], [150, 3, 0, 129, 65], [400, 1]]
SHAPES = [(4, 2, 64), (2, 1, 128), (3, 3, 256), (18, 1, 24)]


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_reference_is_the_formula(lengths: list[int], window: int | None) -> None:
    cached = Cached(lengths, 6, 2, 8, torch.float64)
    for attend in (paged_reference, paged_attention):
        out = attend(cached.query, cached.keys, cached.values, cached.table, cached.lengths, SCALE, window)
        torch.testing.assert_close(out, cached.exact(window), atol=1e-12, rtol=0)


USUAL = [(HALF, 0, None), (HALF, 1, 20), (HALF, 2, None), (HALF, 3, 20), (torch.float32, 0, 20), (torch.float32, 1, None)]
"""Each shape once in half precision, with a window or without, and two in float32."""
OTHERS = [case for case in itertools.product((HALF, torch.float32), range(len(SHAPES)), (None, 20)) if case not in USUAL]


@pytest.mark.parametrize(("dtype", "heads", "window"), [*USUAL, *slow(*OTHERS)])
def test_the_kernel_is_the_reference(dtype: torch.dtype, heads: int, window: int | None) -> None:
    pytest.importorskip("triton")
    from tinsmith.models.paged_kernels import paged_kernel

    if dtype == torch.float32 and DEVICE == "cuda":
        pytest.skip("its products of float32 are less exact there: `paged_attention` does not use it")
    splits = [[530, *[7] * others] for others in (0, 2, 39)]  # a row alone is shared by more programs than one among many
    for lengths in [*LENGTHS, *(splits if (dtype, heads, window) == USUAL[0] else [])]:
        cached = Cached(lengths, *SHAPES[heads], dtype)
        query = torch.stack([cached.query, cached.query], 1)[:, 0]  # rows that do not lie next to each other
        out = paged_kernel(query, cached.keys, cached.values, cached.table, cached.lengths, SCALE, window)
        torch.testing.assert_close(out.double(), cached.exact(window), atol=BOUNDS[dtype], rtol=BOUNDS[dtype])


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("shape", [*SHAPES[:2], *slow(*((shape,) for shape in SHAPES[2:]))])  # read above, where nothing is stored
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_newest_token_is_stored_on_the_way(lengths: list[int], shape: tuple[int, int, int], window: int | None) -> None:
    """Its key and value lie in wider rows, as those of a joint projection, and in the cache is still a NaN in their place."""
    pytest.importorskip("triton")
    from tinsmith.models.paged_kernels import paged_kernel

    cached = Cached(lengths, *shape, HALF)
    _, kv_heads, head_dim = shape
    rows, width = len(lengths), kv_heads * head_dim
    expected = paged_reference(cached.query, cached.keys, cached.values, cached.table, cached.lengths, SCALE, window)
    wide = torch.zeros(rows, 3 * width, dtype=HALF, device=DEVICE)
    key, value = (wide[:, first : first + width].unflatten(1, (kv_heads, head_dim)) for first in (width, 2 * width))
    keys, values = cached.keys.clone(), cached.values.clone()
    for row, length in enumerate(lengths):
        if length:
            place = int(cached.table[row, (length - 1) // BLOCK]), (length - 1) % BLOCK
            key[row], value[row] = keys[place], values[place]
            keys[place], values[place] = math.nan, math.nan
    found = paged_kernel(cached.query, keys, values, cached.table, cached.lengths, SCALE, window, newest=(key, value))
    torch.testing.assert_close(found, expected, atol=BOUNDS[HALF], rtol=BOUNDS[HALF])
    assert torch.equal(keys.nan_to_num(9.0), cached.keys.nan_to_num(9.0))
    assert torch.equal(values.nan_to_num(9.0), cached.values.nan_to_num(9.0))


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU captures no graphs")
def test_a_captured_graph_reads_lengths_and_blocks_anew() -> None:
    first, second = (Cached([*lengths, 700], 16, 8, 128, torch.bfloat16) for lengths in ([0, 1, 300], [650, 40, 0]))
    inputs = [first.query, first.keys, first.values, first.table, first.lengths]
    paged_attention(first.query, first.keys, first.values, first.table, first.lengths, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(first.query, first.keys, first.values, first.table, first.lengths, SCALE)
    for memory, other in zip(inputs, [second.query, second.keys, second.values, second.table, second.lengths], strict=True):
        memory.copy_(other)
    graph.replay()
    torch.testing.assert_close(out.double(), second.exact(None), atol=1.6e-2, rtol=1.6e-2)
