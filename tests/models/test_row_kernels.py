"""The Triton kernels of a decoder layer's elementwise pieces against the functions that they stand for."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models import fused

DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tinsmith.models.row_kernels")


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_alike(found: Any, expected: Any, dtype: torch.dtype) -> None:
    """Within two roundings of the dtype."""
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(3, 40), (1, 64), (5, 1)])
def test_norms(kernels: Any, rows: int, width: int, zero_centred: bool, dtype: torch.dtype) -> None:
    x, delta, d, more = (drawn(rows, width, seed=seed, dtype=dtype) for seed in range(4))
    weight = drawn(width, seed=4, dtype=dtype)
    rest = (1e-6, zero_centred)
    assert_alike(kernels.rms_norm(x, weight, *rest), fused.rms_norm.function(x, weight, *rest), dtype)
    assert_alike(kernels.add_rms_norm(x, delta, weight, *rest), fused.add_rms_norm.function(x, delta, weight, *rest), dtype)
    for also in (None, more):
        found = kernels.rms_norm_backward(x, weight, d, also, *rest)
        torch.testing.assert_close(found, fused.rms_norm_backward.function(x, weight, d, also, *rest), rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 40), (1, 64), (5, 1000)])
def test_layer_norms(kernels: Any, rows: int, width: int, dtype: torch.dtype) -> None:
    x, delta = (drawn(rows, width, seed=seed, dtype=dtype) + 3 for seed in range(2))
    weight, bias = (drawn(width, seed=seed, dtype=dtype) for seed in (2, 3))
    total, normed = kernels.add_layer_norm(x, delta, weight, bias, 1e-6)
    expected_total, expected = fused.add_layer_norm.function(x, delta, weight, bias, 1e-6)
    assert torch.equal(total, expected_total)
    eps = torch.finfo(dtype).eps  # sums of up to 11 are rounded by half of it, and weights are up to 4
    torch.testing.assert_close(normed, expected, rtol=4 * eps, atol=11 * 4 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 1030])
def test_swiglu(kernels: Any, width: int, dtype: torch.dtype) -> None:
    gate_up, d = drawn(3, 2 * width, seed=0, dtype=dtype), drawn(3, width, seed=1, dtype=dtype)
    assert_alike(kernels.swiglu(gate_up), fused.swiglu.function(gate_up), dtype)
    assert_alike(kernels.swiglu_backward(gate_up, d), fused.swiglu_backward.function(gate_up, d), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [None, False, True])
@pytest.mark.parametrize(("heads", "width", "pairs"), [(10, 16, 8), (3, 24, 4), (1, 8, 4)])
def test_rotations(kernels: Any, heads: int, width: int, pairs: int, normed: bool | None, dtype: torch.dtype) -> None:
    """Of a part of wider rows, as queries and keys lie in them; `normed` says whether the norm is zero-centred, None is no norm."""
    x = drawn(4, heads + 2, 2 * width, seed=0, dtype=dtype)[:, 1 : heads + 1, :width]
    weight = None if normed is None else drawn(heads, width, seed=1, dtype=dtype)
    angles = drawn(4, pairs, seed=2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.t().contiguous().t().sin()  # the latter lies transposed
    rest = (1e-6, bool(normed))
    assert_alike(kernels.rotate(x, weight, cos, sin, *rest), fused.rotate.function(x, weight, cos, sin, *rest), dtype)
    d = drawn(4, heads, width, seed=3, dtype=dtype)
    found, expected = (torch.zeros(4, heads, 2 * width, device=DEVICE, dtype=dtype) for _ in range(2))
    kernels.rotate_backward(x, weight, cos, sin, d, *rest, found[..., :width])
    fused.rotate_backward.function(x, weight, cos, sin, d, *rest, expected[..., :width])
    torch.testing.assert_close(
        found, expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )
