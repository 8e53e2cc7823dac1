"""Weights that differ in any way have another identity, and each worker's share of a matrix is found."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tinsmith.sampling.inside_vllm import identity as room
from tinsmith.sampling.inside_vllm.identity import share_of


def identity(tensors: dict[str, Tensor]) -> str:
    return room.identity(tensors.items())


def tensors(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in (("a", (8, 64)), ("b", (96, 8)), ("norm", (64,)))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_bit_of_one_value_changes_it(dtype: torch.dtype) -> None:
    known = {identity(tensors(dtype))}
    for name, tensor in tensors(dtype).items():
        for index in (0, tensor.numel() // 2, tensor.numel() - 1):
            changed = tensors(dtype)
            bits = changed[name].view(torch.int16 if dtype == torch.bfloat16 else torch.int32).view(-1)
            bits[index] ^= 1
            known.add(identity(changed))
    assert len(known) == 10


def test_names_and_places_count() -> None:
    first = tensors()
    renamed = {"other": first["a"], "b": first["b"], "norm": first["norm"]}
    exchanged = first | {"a": first["a"].flip(0)}
    turned = first | {"a": first["a"].flip(1)}
    fewer = {"a": first["a"], "b": first["b"]}
    assert len({identity(one) for one in (first, renamed, exchanged, turned, fewer)}) == 5


def test_order_padding_and_layout_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tensors()
    expected = identity(first)
    assert identity(dict(reversed(first.items()))) == expected
    assert identity(first | {"a": pad(first["a"], (0, 5, 0, 7))}) == expected
    assert identity(first | {"b": first["b"].T.contiguous().T}) == expected
    monkeypatch.setitem(room._AT_ONCE, "cpu", 100)
    assert identity(first) == expected


def test_it_is_the_same_tomorrow() -> None:
    """Both sides may run different versions of PyTorch."""
    assert identity({"a": torch.arange(6, dtype=torch.float32).reshape(2, 3)}) == "512a918ac0200000"


def test_tensors_of_one_shape_count_each_under_its_own_name() -> None:
    """They are added up together."""
    first = {f"layer{i}": tensor for i, tensor in enumerate(torch.randn(40, 8, 64, generator=torch.Generator().manual_seed(1)))}
    alone = sum(int(identity({name: tensor}), 16) for name, tensor in first.items()) % 2**64
    assert f"{alone:016x}" == identity(first) == identity(dict(reversed(first.items())))
    assert identity(first | {"layer3": first["layer7"], "layer7": first["layer3"]}) != identity(first)
    changed = first | {"layer39": first["layer39"].clone()}
    changed["layer39"].view(torch.int32)[7, 63] ^= 1
    assert identity(changed) != identity(first)


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
