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
    return {
        name: torch.randn(size, generator=generator).to(dtype)
        for name, size in (("a", (8, 64)), ("b", (96, 8)), ("norm", (64,)))
    }


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16)])
def test_the_last_bit_of_one_value_names_and_places_count(dtype: torch.dtype, bits: torch.dtype) -> None:
    first = tensors(dtype)
    known = [first, {"other": first["a"], "b": first["b"], "norm": first["norm"]}, {"a": first["a"], "b": first["b"]}]
    known += [first | {"a": first["a"].flip(dim)} for dim in (0, 1)]
    for name, tensor in first.items():
        for index in (0, tensor.numel() // 2, tensor.numel() - 1):
            known.append(tensors(dtype))
            known[-1][name].view(bits).view(-1)[index] ^= 1
    assert len({identity(one) for one in known}) == len(known) == 14


def test_order_padding_and_layout_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first = tensors()
    expected = identity(first)
    padded, turned = first | {"a": pad(first["a"], (0, 5, 0, 7))}, first | {"b": first["b"].T.contiguous().T}
    assert [identity(one) for one in (dict(reversed(first.items())), padded, turned)] == [expected] * 3
    monkeypatch.setitem(room._AT_ONCE, "cpu", 100)
    assert identity(first) == expected


def test_it_is_the_same_tomorrow() -> None:
    """Both sides may run different versions of PyTorch."""
    assert identity({"a": torch.arange(6, dtype=torch.float32).reshape(2, 3)}) == "512a918ac0200000"


def test_tensors_of_one_shape_count_each_under_its_own_name() -> None:
    """They are added up together."""
    first = {
        f"layer{i}": tensor
        for i, tensor in enumerate(torch.randn(40, 8, 64, generator=torch.Generator().manual_seed(1)))
    }
    alone = sum(int(identity({name: tensor}), 16) for name, tensor in first.items()) % 2**64
    assert f"{alone:016x}" == identity(first) == identity(dict(reversed(first.items())))
    assert identity(first | {"layer3": first["layer7"], "layer7": first["layer3"]}) != identity(first)
    changed = first | {"layer39": first["layer39"].clone()}
    changed["layer39"].view(torch.int32)[7, 63] ^= 1
    assert identity(changed) != identity(first)


A, B = (
    torch.randn(4, 12, generator=torch.Generator().manual_seed(0)),
    torch.randn(24, 4, generator=torch.Generator().manual_seed(1)),
)
RANK = 16
"""Slots have room for adapters of this rank."""


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shares_are_the_whole_in_order_and_what_is_not_divided_is_whole_everywhere(ranks: int) -> None:
    """Columns of A where the inputs of a layer are divided, rows of B where its outputs are."""
    columns, rows = torch.empty(RANK, 12 // ranks), torch.empty(24 // ranks, RANK)
    assert torch.equal(torch.cat([share_of(A, columns, rank, ranks) for rank in range(ranks)], 1), A)
    assert torch.equal(torch.cat([share_of(B, rows, rank, ranks) for rank in range(ranks)]), B)
    for rank in range(ranks):
        assert torch.equal(share_of(A, torch.empty(RANK, 12), rank, ranks), A)
        assert torch.equal(share_of(B, torch.empty(32, RANK), rank, ranks), B)


def test_few_heads_are_on_several_workers() -> None:
    """Two heads of keys on four workers."""
    for rank, half in enumerate((B[:12], B[:12], B[12:], B[12:])):
        assert torch.equal(share_of(B, torch.empty(12, RANK), rank, 4), half)
