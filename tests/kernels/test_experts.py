"""Mixtures of experts of a decoding step, with adapters of its rows, against the formula in float64."""

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tests.bases import DEVICE
from tinsmith.models.batched_lora import OUTPUTS, output_tiles
from tinsmith.models.lora import LORA_ALPHA
from tinsmith.models.quantized import FORMATS, Format, numbers_of, quantize

HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # Triton's interpreter knows no bfloat16
EXPERTS, HIDDEN, WIDTH, COLUMNS = 6, 144, 40, 64
SPANS = [(0, 0), (3, 40), (40, 45), (0, 3), (45, 60)]
"""Columns of rows; the first row has none, and no row those from 60 on."""


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    return importlib.import_module("tinsmith.kernels.experts")


def drawn(*shape: int, seed: int) -> Tensor:
    numbers: Tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return numbers


def chosen_of(rows: int, kind: str) -> Tensor:
    """The experts of rows [rows, 2]: none has the last, or the first two have all."""
    if kind == "two":
        return torch.tensor([[1, 0]]).expand(rows, 2).contiguous()
    draw = torch.rand(rows, EXPERTS - 1, generator=torch.Generator().manual_seed(rows))
    return draw.topk(2, -1).indices


def exact(h: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, own: Any) -> Tensor:
    """The formula of `models/experts.py`, row after row, in float64."""
    found = torch.zeros(h.shape, dtype=torch.float64, device=h.device)
    for row, x in enumerate(h.double()):
        start, end = (0, 0) if own is None else own.columns[row].tolist()
        scale = LORA_ALPHA / max(end - start, 1)
        for weight, expert in zip(weights[row].double(), chosen[row].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x).chunk(2)
            if end > start:
                for part, a, b in zip((gate, up), own.a, own.b[expert].chunk(2), strict=True):
                    part += scale * b[:, start:end].double() @ (a[start:end].double() @ x)
            activated = silu(gate) * up
            out = down[expert].double() @ activated
            if end > start:
                inner = own.inner[expert, start:end].double() @ activated
                out += scale * own.outer[:, start:end].double() @ inner
            found[row] += weight * out
    return found


@pytest.mark.parametrize(("rows", "kind"), [(1, "any"), (21, "any"), (21, "two"), (40, "two")])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_kernels_are_the_formula(kernels: Any, rows: int, kind: str, adapters: bool) -> None:
    """A row of NaN, and columns of NaN that no row has, reach no other row."""
    h, gate_up, down = (
        drawn(rows, HIDDEN, seed=1),
        drawn(EXPERTS, 2 * WIDTH, HIDDEN, seed=2),
        drawn(EXPERTS, HIDDEN, WIDTH, seed=3),
    )
    h, gate_up, down = ((tensor * size).to(DEVICE, HALF) for tensor, size in ((h, 12), (gate_up, 1), (down, 2)))
    weights, chosen = torch.rand(rows, 2).to(DEVICE, HALF), chosen_of(rows, kind).to(DEVICE)
    own = None
    if adapters:
        columns = torch.tensor([SPANS[row % len(SPANS)] for row in range(rows)], device=DEVICE)
        a, b = drawn(2, COLUMNS, HIDDEN, seed=4), drawn(EXPERTS, 2 * WIDTH, COLUMNS, seed=5)
        inner, outer = drawn(EXPERTS, COLUMNS, WIDTH, seed=6), drawn(HIDDEN, COLUMNS, seed=7)
        a[:, 60:] = inner[:, 60:] = math.nan
        a, b, inner, outer = (tensor.to(DEVICE, HALF) for tensor in (a, b, inner, outer))
        tiles = output_tiles([(0, HIDDEN)], torch.device(DEVICE))
        own = kernels.RowMatrices(columns, a, b, inner, outer, tiles, OUTPUTS, LORA_ALPHA)
    expected = exact(h, weights, chosen, gate_up, down, own)
    if rows > 1:
        h[-1, 0] = math.nan
    found = kernels.mix(h, weights, chosen, gate_up, down, own)
    kept = rows - (rows > 1)
    bound = 4 * torch.finfo(HALF).eps  # gate, up, their product and the sum are rounded, and what adapters reduce
    error = (found[:kept].double() - expected[:kept]).abs().max() / expected[:kept].abs().max()
    assert error < bound
    assert found[kept:].isnan().all()


@pytest.mark.parametrize("rows", [1, 21])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_coded_matrices_give_the_bits_of_those_that_they_stand_for(kernels: Any, form: Format, rows: int) -> None:
    """Rows of 144 and of 40 numbers fill no last group."""
    h, weights = drawn(rows, HIDDEN, seed=1).to(DEVICE, HALF) * 12, torch.rand(rows, 2).to(DEVICE, HALF)
    table, plain, coded = torch.tensor(form.values, device=DEVICE), [], []
    for shape, size in (((EXPERTS, 2 * WIDTH, HIDDEN), 1), ((EXPERTS, HIDDEN, WIDTH), 2)):
        weight = (drawn(*shape, seed=size) * size).to(DEVICE, HALF)
        codes, scales = quantize(weight, form)
        plain.append(numbers_of(codes, scales, table, form.group).to(HALF))
        coded.append(kernels.CodedMatrices(codes, scales, table, form.group))
        assert not torch.equal(plain[-1], weight)
    chosen = chosen_of(rows, "any").to(DEVICE)
    found, expected = (kernels.mix(h, weights, chosen, *own, None) for own in (coded, plain))
    assert torch.equal(found, expected)
    assert found.any(-1).all()


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("experts", "per_token"), [(8, 2), (100, 3), (128, 8)])
def test_experts_are_chosen_as_the_router_of_training_does(
    kernels: Any, experts: int, per_token: int, normalized: bool
) -> None:
    """Many logits are equal; a row of NaN gets experts that exist."""
    logits = torch.randint(-6, 7, (33, experts), generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF) / 2
    probabilities = logits.double().softmax(-1)
    # Sorted without changing the order of equal ones: the first of them are chosen
    greatest, expected = (found[:, :per_token] for found in probabilities.sort(dim=-1, descending=True, stable=True))
    weights, chosen = kernels.choose(logits, per_token, normalized)
    assert torch.equal(chosen, expected)
    if DEVICE == "cuda":  # on a CPU others of equal ones are chosen
        in_training = logits.softmax(-1, dtype=torch.float32).topk(per_token, -1).indices
        assert torch.equal(in_training.sort(-1).values, chosen.sort(-1).values)
    wanted = greatest / greatest.sum(-1, keepdim=True) if normalized else greatest
    torch.testing.assert_close(weights.double(), wanted, rtol=torch.finfo(HALF).eps, atol=1e-7)
    logits[3, 1] = math.nan
    weights, chosen = kernels.choose(logits, per_token, normalized)
    assert ((chosen >= 0) & (chosen < experts)).all()
    assert torch.equal(chosen[4:], expected[4:])
    assert weights[3].isnan().all()
