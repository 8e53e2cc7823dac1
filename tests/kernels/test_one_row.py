"""The linear layers of one row: by the kernel, and as those of many."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models.batched_lora import BareRows, is_one_row, multiply
from tinsmith.models.fused import Normed
from tinsmith.models.joined_linear import JoinedLinear, WeightPiece
from tinsmith.models.layout import Projection
from tinsmith.models.packed_lora import SegmentAdapters

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter knows no bfloat16
DTYPES = [torch.float32, HALF]
SIZES = [(3, 8), (10, 40), (12, 1024), (14, 1030), *([(4096, 2560), (2**14 + 2, 2560)] if DEVICE == "cuda" else [])]
"""Outputs and inputs of a layer: some fill no tile, some several. The last of a GPU is wide."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tinsmith.kernels.one_row")


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def layer(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> JoinedLinear:
    weight = drawn(outputs, inputs, seed=1, dtype=dtype) / inputs**0.5
    piece = WeightPiece((0, outputs), weight, drawn(outputs, seed=2, dtype=dtype) if bias else None)
    return JoinedLinear(Projection("x", ("a",), {"a": (0, outputs)}, inputs, outputs), ((0, outputs),), (piece,))


def assert_rounded(found: Tensor, linear: JoinedLinear, row: Tensor) -> None:
    """Check `found`, the layer of a row of numbers near 1, against float64, but for rounding."""
    exact = row.double() @ linear.weight.double().t() + (0 if linear.bias is None else linear.bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(found.dtype).eps, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_one_row_is_multiplied_as_many_are(
    kernels: Any, outputs: int, inputs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a row of a view between others, and by a matrix so wide that it is cut into shorter pieces."""
    both = drawn(1, 2 * inputs, seed=3, dtype=dtype)
    for bias, wide in ((False, None), (True, None), (True, 10)):
        if wide:
            monkeypatch.setattr(kernels, "WIDE", wide)
        linear = layer(outputs, inputs, bias, dtype)
        for x in (both[:, :inputs], both[:, inputs:], both[:, ::2]):
            assert_rounded(kernels.multiply(x, linear.weight, linear.bias), linear, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [Normed(1e-6, False), Normed(1e-2, True)])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES[1::2])
@torch.no_grad()
def test_a_norm_before_it_is_computed_too(
    kernels: Any, outputs: int, inputs: int, norm: Normed, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the sum of two rows and for one row: as without the kernel, to the last bit or a rounding."""
    linear, factor = layer(outputs, inputs, True, dtype), drawn(inputs, seed=5, dtype=dtype)
    x, other = drawn(1, inputs, seed=3, dtype=dtype), drawn(1, inputs, seed=4, dtype=dtype)
    monkeypatch.setattr("tinsmith.models.batched_lora.is_one_row", lambda x: True)
    for delta in (other, None):
        found, total = BareRows().project(linear, norm, x, delta, factor)
        expected, sums = SegmentAdapters(()).project(linear, norm, x, delta, factor)
        assert torch.equal(total, sums)
        # A number of the row may be rounded the other way where the norm comes out otherwise in its last bit.
        torch.testing.assert_close(
            found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5 if dtype == torch.float32 else 1e-2
        )


def test_the_kernel_serves_one_row_in_half_precision_on_a_gpu() -> None:
    for rows, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (1, torch.float32)):
        x, linear = drawn(rows, 40, seed=5, dtype=dtype), layer(10, 40, True, dtype)
        assert is_one_row(x) == (DEVICE == "cuda" and rows == 1 and dtype == torch.bfloat16)
        assert_rounded(multiply(linear, x), linear, x)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU runs one kernel after the other")
def test_what_the_kernel_ahead_computes_is_waited_for(kernels: Any) -> None:
    """Kernels that start early, each of the other's result: captured and replayed, as a decoding step is."""
    linears = [layer(2048, 2048, False, torch.bfloat16) for _ in range(2)]
    first = drawn(1, 2048, seed=6, dtype=torch.bfloat16)

    def chain(compute: Any) -> Tensor:
        x = first
        for number in range(40):
            x = compute(x, linears[number % 2])
            x = x / x.float().norm().to(x.dtype) * 32 if number % 8 == 7 else x
        return x

    expected = chain(lambda x, linear: kernels.multiply(x, linear.weight, None).clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda x, linear: kernels.multiply(x, linear.weight, None))
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
