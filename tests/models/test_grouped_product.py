"""The product of groups of rows with a matrix each: the formula in float64, values and both gradients.

Invariant: A group's product and gradients are those of its own rows and matrix, whatever lies in others.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.models.grouped_product import (
    Rows,
    grouped_product,
    masks,
    multiply_groups,
    multiply_rows,
    outer_product,
    slices,
    transposed_product,
)

SIZES = {
    "all groups": [3, 1, 4, 2],
    "empty groups at both ends and between": [0, 2, 0, 0, 5, 0],
    "one group with all rows": [0, 0, 7],
    "no row at all": [0, 0],
    "a single group": [6],
}
"""Rows of each group."""

HOW: dict[str, Callable[[Tensor, int], Rows]] = {"slices": lambda ends, _: slices(ends), "masks": masks}
"""What a CPU does, and what other devices do whose products have no kernel."""


def drawn(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows [rows, 5], matrices [groups, 3, 5], gradients of products [rows, 3], in float64, and ends of groups."""
    generator = torch.Generator().manual_seed(sum(sizes))
    shapes = (sum(sizes), 5), (len(sizes), 3, 5), (sum(sizes), 3)
    x, weight, dy = (torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE) for shape in shapes)
    return x, weight, dy, torch.tensor(sizes, device=DEVICE).cumsum(0, dtype=torch.int32)


def written_out(sizes: list[int], x: Tensor, weight: Tensor) -> Tensor:
    """Each row times the matrix of its group."""
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    rows = [weight[group] @ row for group, row in zip(groups, x, strict=True)]
    return torch.stack(rows) if rows else x.new_zeros(0, weight.shape[1])


@pytest.mark.parametrize("name", SIZES)
def test_product_and_gradients_are_the_formula(name: str) -> None:
    sizes = SIZES[name]
    x, weight, dy, ends = drawn(sizes)
    found = transposed_product(dy, weight, ends), outer_product(dy, x, weight, ends)
    x.requires_grad_()
    weight.requires_grad_()
    expected = written_out(sizes, x, weight)
    torch.testing.assert_close(grouped_product(x.detach(), weight.detach(), ends), expected, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad((expected * dy).sum() + 0 * (x.sum() + weight.sum()), (x, weight))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert not found[1][[size == 0 for size in sizes]].any()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", SIZES)
def test_group_by_group_it_is_the_same_with_slices_and_with_masks(name: str, how: str) -> None:
    sizes = SIZES[name]
    x, weight, dy, ends = drawn(sizes)
    expected = written_out(sizes, x, weight)
    torch.testing.assert_close(multiply_rows(x, weight, HOW[how](ends, len(x))), expected, rtol=1e-12, atol=1e-12)
    outer = [part.t() @ rows for part, rows in zip(dy.split(sizes), x.split(sizes), strict=True)]
    found = multiply_groups(dy, x, weight, HOW[how](ends, len(x)))
    torch.testing.assert_close(found, torch.stack(outer), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("spoiled", ["rows", "matrix", "gradient"])
def test_a_nan_stays_in_its_group(spoiled: str, how: str) -> None:
    sizes = [3, 2, 4]
    x, weight, dy, ends = drawn(sizes)
    own = [0, 1, 2, 5, 6, 7, 8]  # rows of the other groups
    product, outer = multiply_rows(x, weight, slices(ends)), multiply_groups(dy, x, weight, slices(ends))
    {"rows": x[3:5], "matrix": weight[1], "gradient": dy[3:5]}[spoiled].fill_(torch.nan)
    again = multiply_rows(x, weight, HOW[how](ends, len(x)))
    assert torch.isnan(again[3:5]).all() == (spoiled != "gradient")
    torch.testing.assert_close(again[own], product[own], rtol=1e-12, atol=1e-12)
    found = multiply_groups(dy, x, weight, HOW[how](ends, len(x)))
    assert torch.isnan(found[1]).all() == (spoiled != "matrix")
    torch.testing.assert_close(found[[0, 2]], outer[[0, 2]], rtol=1e-12, atol=1e-12)
