"""The Triton kernels of a decoder's elementwise parts and of its softmax, against the functions that they replace."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.bases import DEVICE
from tinsmith import kernels
from tinsmith.kernels.dispatch import SERVED, WithKernel
from tinsmith.models import fused
from tinsmith.training import logprobs

DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
EPS = 1e-6


class Drawn:
    """Random tensors, each other than the one before."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(0), dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE, self.dtype)

    def part(self, tokens: int, heads: int, width: int) -> Tensor:
        """Some heads of wider rows, as queries, keys and gates lie in them."""
        return self(tokens, heads + 2, 2 * width)[:, 1 : heads + 1, :width]

    def turns(self, tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines in float32; the sines lie transposed."""
        angles = self(tokens, pairs).float()
        return angles.cos(), angles.t().contiguous().t().sin()


Arguments = Callable[[Drawn], tuple[Any, ...]]


def norms(rows: int, width: int, zero_centred: bool) -> dict[str, Arguments]:
    return {
        "rms_norm": lambda x: (x(rows, width), x(width), EPS, zero_centred),
        "add_rms_norm": lambda x: (x(rows, width), x(rows, width), x(width), EPS, zero_centred),
        "add_layer_norm": lambda x: (x(rows, width) + 3, x(rows, width), x(width), x(width), EPS),
        "rms_norm_backward": lambda x: (
            *(x(rows, width), x(width), x(rows, width), x(rows, width) if zero_centred else None),
            *(EPS, zero_centred),
        ),
        "rms_norm_weight_gradient": lambda x: (x(rows, width), x(rows, width), EPS),
        "swiglu": lambda x: (x(rows, 2 * width),),
        "swiglu_backward": lambda x: (x(rows, 2 * width), x(rows, width)),
        "clamped_swiglu": lambda x: (5 * x(rows, 2 * width), 1.702, 7.0),
        "clamped_swiglu_backward": lambda x: (5 * x(rows, 2 * width), x(rows, width), 1.702, 7.0),
    }


def heads(tokens: int, count: int, width: int, pairs: int, normed: bool | None) -> dict[str, Arguments]:
    """`normed` says whether norms are zero-centred; with None rotations have none."""

    def weight(x: Drawn) -> Tensor | None:
        return None if normed is None else x(count, width)

    def part(x: Drawn) -> Tensor:
        return x.part(tokens, count, width)

    return {
        "rotate": lambda x: (part(x), weight(x), *x.turns(tokens, pairs), EPS, bool(normed)),
        "rotate_backward": lambda x: (part(x), weight(x), *x.turns(tokens, pairs), part(x), EPS, bool(normed), part(x)),
        "rotate_weight_gradient": lambda x: (part(x), *x.turns(tokens, pairs), part(x), EPS),
        "sigmoid_gate": lambda x: (x(tokens, count, width), part(x)),
        "sigmoid_gate_backward": lambda x: (part(x), part(x), x(tokens, count, width)),
        "gated_rms_norm": lambda x: (x(tokens, count, width), part(x), x(width), EPS),
        "gated_rms_norm_backward": lambda x: (part(x), part(x), x(width), x(tokens, count, width), EPS),
        "gated_rms_norm_weight_gradient": lambda x: (part(x), part(x), part(x), EPS),
    }


def memory(tokens: int, count: int, strength: float) -> dict[str, Arguments]:
    def inputs(x: Drawn) -> tuple[Tensor, ...]:
        together = x(tokens, 3 * count) * strength
        return together[:, :count], together[:, count : 2 * count], x(count), x(count)

    return {
        "memory_gates": inputs,
        "memory_gates_backward": lambda x: (*inputs(x), x(tokens, count).float(), x(tokens, 2 * count)[:, ::2]),
    }


def softmax(rows: int, vocabulary: int) -> dict[str, Arguments]:
    """In the second of the rows nothing has a gradient, and not all logits are numbers."""

    def inputs(x: Drawn) -> tuple[Tensor, ...]:
        logits, grad = x(rows, vocabulary) * 5, x(rows, 2)[:, :1].float()
        if rows > 1:
            logits[1, ::2], grad[1] = torch.inf, 0.0
        target = torch.randint(0, vocabulary, (rows, 1), generator=x.generator).to(DEVICE)
        return logits, *logprobs.logit_norms.function(logits), target, grad

    return {"logit_norms": lambda x: (x(rows, vocabulary) * 5,), "become_gradient": inputs}


CASES = [
    *(norms(*sizes).items() for sizes in ((3, 40, False), (5, 1, False), (2, 1030, True))),
    *(heads(*sizes).items() for sizes in ((4, 10, 16, 8, False), (4, 3, 24, 4, True), (1, 1, 8, 4, None))),
    *(memory(*sizes).items() for sizes in ((3, 5, 1.0), (70, 16, 30.0))),
    *(softmax(*sizes).items() for sizes in ((3, 50), (1, 9000), (2, 20000))),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "arguments"), [case for cases in CASES for case in cases])
def test_a_kernel_computes_what_its_function_does(name: str, arguments: Arguments, dtype: torch.dtype) -> None:
    """Within two roundings of the dtype, and those of float32 in sums of up to 300.

    What is written to arguments is compared too.
    """
    assert_same(name, arguments, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_weights_are_added_up_in_stripes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several tokens each."""
    pytest.importorskip("triton")
    monkeypatch.setattr("tinsmith.kernels.rows.STRIPES", 4)
    for name, arguments in (norms(11, 40, False) | heads(11, 2, 8, 2, False)).items():
        if "weight" in name:
            assert_same(name, arguments, dtype)


def assert_same(name: str, arguments: Arguments, dtype: torch.dtype) -> None:
    """The kernel and its function come to the same."""
    pytest.importorskip("triton")
    function = FUNCTIONS[name]
    (ours, theirs), kernel = (
        (arguments(Drawn(dtype)) for _ in range(2)),
        getattr(importlib.import_module(f"tinsmith.kernels.{function.kernels}"), name),
    )
    bound = 4 * torch.finfo(dtype).eps
    found, expected = (kernel(*ours), *ours), (function.function(*theirs), *theirs)
    torch.testing.assert_close(
        found, expected, rtol=bound, atol=bound + 300 * torch.finfo(torch.float32).eps, equal_nan=True
    )


FUNCTIONS = {
    name: found for room in (fused, logprobs) for name, found in vars(room).items() if isinstance(found, WithKernel)
}


def test_every_kernel_is_tried() -> None:
    assert {name for cases in CASES for name, _ in cases} == set(FUNCTIONS)


def test_the_table_names_all_modules_of_kernels() -> None:
    """But for the two that `kernels/delta_rule.py` is made of."""
    modules = {
        path.stem for path in Path(kernels.__file__).parent.glob("*.py") if "\nimport triton\n" in path.read_text()
    }
    assert modules - {"delta_forward", "delta_backward"} | {"delta_rule"} == set(SERVED)
