"""Whether kernels for gated delta nets are believed: they compute a small row first."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
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


@pytest.mark.parametrize("name", ["x", "weight"])
def test_a_wrong_gradient_of_a_convolution_is_found_by_name(name: str) -> None:
    def convolution(x: Tensor, weight: Tensor, lengths: tuple[int, ...], before: Tensor | None) -> Tensor:
        assert before is None
        return convolve_anew(x, weight, Lengths(lengths))

    def wrong(x: Tensor, weight: Tensor, lengths: tuple[int, ...], before: Tensor | None) -> Tensor:
        make: Any = _Wrong.apply
        return convolution(make(x) if name == "x" else x, weight if name == "x" else make(weight), lengths, before)

    assert convolution_disagreement(convolution, torch.device(DEVICE), torch.bfloat16) == ""
    found = convolution_disagreement(wrong, torch.device(DEVICE), torch.bfloat16)
    assert found.startswith(f"its gradients of {name} are 0.5 of their norm")


def test_bfloat16_on_cuda_runs_on_kernels_and_nothing_else_does() -> None:
    x = torch.zeros(1, device=DEVICE)
    assert kernels_for(x) is None
    assert kernels_for(x.half()) is None
    assert (kernels_for(x.bfloat16()) is not None) == (DEVICE == "cuda")
