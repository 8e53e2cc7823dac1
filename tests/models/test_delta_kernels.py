"""Whose way a gated delta net takes: kernels are believed when they have computed a small row, and transformers computes in PyTorch."""

import functools
import inspect
from collections.abc import Sequence
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


class Altered(torch.autograd.Function):
    """Values times one number, with a gradient times another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: float, gradient: float) -> Tensor:
        ctx.gradient = gradient
        return x * values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.gradient, None, None


def altered(tensors: Sequence[Any], place: int, values: float, gradient: float) -> list[Any]:
    """The tensors, of which one is altered; none at place -1."""
    make: Any = Altered.apply
    return [make(x, values, gradient) if number == place else x for number, x in enumerate(tensors)]


@pytest.mark.parametrize(
    ("inputs", "outputs", "found"),
    [
        ((-1, 1, 1), (-1, 1, 1), ""),
        *(
            ((n, 1, 1.5), (-1, 1, 1), f"its gradients of {name} are 0.5 of")
            for n, name in enumerate(["query", "key", "value", "decay", "beta"])
        ),
        ((-1, 1, 1), (0, 2, 1), "its outputs are 1 of their norm"),
        ((-1, 1, 1), (1, torch.nan, 1), "its states are nan of their norm"),
    ],
)
def test_what_a_rule_computes_wrongly_is_found_by_name(inputs: Any, outputs: Any, found: str) -> None:
    """Our own code, called as kernels are, agrees with itself."""

    def rule(*arguments: Any) -> Any:
        query, key, value, decay, beta, lengths, before, keeps = altered(arguments, *inputs)
        chunks = chunks_of(lengths, key.shape[2], value.device)
        return tuple(altered(delta_rule_in_chunks(query, key, value, decay, beta, chunks, before, keeps), *outputs))

    said = disagreement(rule, torch.device(DEVICE), torch.bfloat16)
    assert said.startswith(found)
    assert bool(said) == bool(found)


@pytest.mark.parametrize(("place", "found"), [(-1, ""), (0, "its gradients of x are 0.5 of"), (1, "its gradients of weight are 0.5 of")])
def test_what_a_convolution_computes_wrongly_is_found_by_name(place: int, found: str) -> None:
    def convolution(*arguments: Any) -> Tensor:
        x, weight, lengths, _ = altered(arguments, place, 1, 1.5)
        return convolve_anew(x, weight, Lengths(lengths))

    said = convolution_disagreement(convolution, torch.device(DEVICE), torch.bfloat16)
    assert said.startswith(found)
    assert bool(said) == bool(found)


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
