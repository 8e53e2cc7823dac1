"""The shares of a matrix are as vLLM divides it: together the whole, in order, and heads that are fewer than workers on several."""

import pytest
import torch

from tinsmith.sampling.inside_vllm.shares import share_of

A, B = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)), torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
RANK = 16
"""Slots have room for adapters of this rank."""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_the_whole_in_order(ranks: int) -> None:
    """Columns of A where the inputs of a layer are divided, rows of B where its outputs are."""
    columns, rows = torch.empty(RANK, 12 // ranks), torch.empty(24 // ranks, RANK)
    assert torch.equal(torch.cat([share_of(A, columns, rank, ranks) for rank in range(ranks)], 1), A)
    assert torch.equal(torch.cat([share_of(B, rows, rank, ranks) for rank in range(ranks)]), B)


def test_what_is_not_divided_is_whole_everywhere_and_few_heads_are_on_several_workers() -> None:
    """Two heads of keys on four workers."""
    for rank in range(2):
        assert torch.equal(share_of(A, torch.empty(RANK, 12), rank, 2), A)
        assert torch.equal(share_of(B, torch.empty(32, RANK), rank, 2), B)
    for rank, half in enumerate((B[:12], B[:12], B[12:], B[12:])):
        assert torch.equal(share_of(B, torch.empty(12, RANK), rank, 4), half)
