"""Whose way a gated delta net takes: kernels are believed when they have computed a small row, and transformers computes in PyTorch."""

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.bases import DEVICE
from tinsmith.models.base import BaseModel
from tinsmith.models.delta_chunks import chunks_of, delta_rule_in_chunks
from tinsmith.models.delta_kernels import convolution_disagreement, disagreement, kernels_for
from tinsmith.models.delta_rule import Lengths, convolve_anew

PLACES = {"query": 0, "key": 1, "value": 2, "decay": 3, "beta": 4}


class _Wrong(torch.autograd.Function):
    """The same values, and half as much gradient again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.5


def rule(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Our own code, called as the kernels are."""
    query, key, value, decay, beta, lengths, before, keeps = arguments
    return delta_rule_in_chunks(query, key, value, decay, beta, chunks_of(lengths, key.shape[2], value.device), before, keeps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_own_code_agrees_with_itself(dtype: torch.dtype) -> None:
    assert disagreement(rule, torch.device(DEVICE), dtype) == ""


@pytest.mark.parametrize("name", PLACES)
def test_a_wrong_gradient_is_found_by_name(name: str) -> None:
    def wrong(*arguments: Any) -> tuple[Tensor, Tensor]:
        inputs = list(arguments)
        make: Any = _Wrong.apply
        inputs[PLACES[name]] = make(inputs[PLACES[name]])
        return rule(*inputs)

    assert disagreement(wrong, torch.device(DEVICE), torch.bfloat16).startswith(f"its gradients of {name} are 0.5 of their norm")


def test_wrong_values_are_found() -> None:
    def doubled(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, after = rule(*arguments)
        return 2 * out, after

    def broken(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, after = rule(*arguments)
        return out, after * torch.nan

    assert disagreement(doubled, torch.device(DEVICE), torch.bfloat16).startswith("its outputs are 1 of their norm")
    assert disagreement(broken, torch.device(DEVICE), torch.bfloat16).startswith("its states are nan of their norm")


@pytest.mark.parametrize("place", [0, 1])
def test_a_wrong_gradient_of_a_convolution_is_found_by_name(place: int) -> None:
    def right(x: Tensor, weight: Tensor, lengths: tuple[int, ...], before: Tensor | None) -> Tensor:
        assert before is None
        return convolve_anew(x, weight, Lengths(lengths))

    def wrong(*arguments: Any) -> Tensor:
        inputs = list(arguments)
        make: Any = _Wrong.apply
        inputs[place] = make(inputs[place])
        return right(*inputs)

    assert convolution_disagreement(right, torch.device(DEVICE), torch.bfloat16) == ""
    found = convolution_disagreement(wrong, torch.device(DEVICE), torch.bfloat16)
    assert found.startswith(f"its gradients of {('x', 'weight')[place]} are 0.5 of their norm")


def test_bfloat16_on_cuda_runs_on_kernels_and_nothing_else_does() -> None:
    x = torch.zeros(1, device=DEVICE)
    assert kernels_for(x) is None
    assert kernels_for(x.half()) is None
    assert (kernels_for(x.bfloat16()) is not None) == (DEVICE == "cuda")


FUNCTIONS = ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"]


def test_transformers_computes_in_pytorch_where_kernels_are_installed(hybrid_base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = hybrid_base.language_model.layers[0].linear_attn
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = layer(hidden)
    for name in FUNCTIONS:

        def kernel(*arguments: object, **keywords: object) -> None:
            raise AssertionError("a kernel was called")

        written = inspect.unwrap(getattr(modeling_qwen3_5, name))
        monkeypatch.setattr(modeling_qwen3_5, name, functools.wraps(written)(kernel))
    kernels = [getattr(modeling_qwen3_5, name) for name in FUNCTIONS]
    with pytest.raises(AssertionError, match="a kernel was called"):
        type(layer).forward(layer, hidden)
    assert torch.equal(layer(hidden), expected)
    assert [getattr(modeling_qwen3_5, name) for name in FUNCTIONS] == kernels  # as they were
