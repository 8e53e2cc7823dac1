"""The kernel that unpacks matrices of experts, against PyTorch's operations."""

import importlib

import pytest
import torch

from tests.bases import DEVICE
from tinsmith.models.quantized import FORMATS, Format, quantize, unpack

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter knows no bfloat16
SHAPES = [
    (4, 5, 64),
    (3, 9, 48),
    (2, 3, 2),
    (3, 70, 1100),
    *([(64, 1024, 2048), (64, 2048, 768)] if DEVICE == "cuda" else []),
]
"""Experts, rows and columns: some fill no tile, some several, some no last group."""


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_it_writes_the_same_bits_and_leaves_experts_without_rows(
    form: Format, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    kernel = importlib.import_module("tinsmith.kernels.quantized").unpack
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    weight[0, 0] = 0
    weight[0, 1, 0] = 2.0**-140  # below the range of float32's normal numbers
    codes, scales = (tensor.to(DEVICE) for tensor in quantize(weight.to(dtype), form))
    ends = torch.arange(1, shape[0] + 1, dtype=torch.int32, device=DEVICE)
    ends[1] = ends[0]  # the second has no row
    table = torch.tensor(form.values, device=DEVICE)
    found, expected = (torch.full(shape, torch.inf, dtype=dtype, device=DEVICE) for _ in range(2))
    kernel(found, codes, scales, ends, table, form.group)
    unpack.function(expected, codes, scales, ends, table, form.group)
    assert torch.equal(found, expected)
    assert found[1].isinf().all()
    assert found[0].isfinite().all()
    assert (found[0, 0] == 0).all()


def test_what_lies_otherwise_is_refused() -> None:
    pytest.importorskip("triton")
    kernel = importlib.import_module("tinsmith.kernels.quantized").unpack
    form = FORMATS["nf4"]
    codes, scales = quantize(torch.ones(2, 3, 128, device=DEVICE), form)
    ends, out = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE), torch.empty(2, 128, 3, device=DEVICE)
    with pytest.raises(ValueError, match="must be contiguous"):
        kernel(out.transpose(1, 2), codes, scales, ends, torch.tensor(form.values, device=DEVICE), form.group)
