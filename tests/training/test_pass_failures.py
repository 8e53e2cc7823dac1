"""A pass that fails: only the datum whose fault it is, and no gradient counts twice.

Invariant: Memory that runs out anywhere in a pass counts no gradient twice.
Also: `tests/training/test_out_of_memory.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bases import datum, load, random_tokens, renderer
from tests.training.test_backend import assert_same, backend_with, compute, gradients
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import Effort
from tinsmith.training.backend import DatumResult, DatumWork

ERRORS: dict[str, Exception | str] = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "torch": RuntimeError("The size of tensor a (6) must match the size of tensor b (7)"),
    "python": IndexError("index 9 is out of bounds"),
    "shape": "the pass failed: ValueError: cannot reshape array of size 8 into shape (7",
    "gone": "model gone is not loaded; create it anew",
}
"""What torch raises, or what is said of numbers for another length and of a model that memory had no room for."""


class MemoryEnds(TorchDispatchMode):
    """Counts the operations that take memory; the one numbered `fails` finds none."""

    def __init__(self, fails: int) -> None:
        begin: Any = super().__init__
        begin()
        self.fails = fails
        self.count: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and not function.name().split("::")[1].split(".")[0].endswith("_"):
            self.count += 1
            if self.count == self.fails:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_one_bad_datum_fails_alone_and_the_results_of_the_others_are_their_own(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    backend, render = backend_with(text_base, a=4, b=4), renderer(text_base)
    work = [datum("ab"[i % 2], render.render([random_tokens(i, 5 + i)]), i) for i in range(7)]
    alone = [result for item in work if item is not work[2] for result in compute(backend, [item])]
    expected = {name: gradients(backend, name) for name in "ab"}
    run, error = backend._run, ERRORS[kind]

    def failing(some: Sequence[DatumWork], backward: bool, effort: Effort) -> list[DatumResult]:
        if isinstance(error, Exception) and any(item is work[2] for item in some):
            raise error
        return run(some, backward, effort)

    monkeypatch.setattr(backend, "_run", failing)
    if kind == "gone":
        work[2] = replace(work[2], model_id="gone")
    elif kind == "shape":
        work[2] = replace(work[2], loss_inputs={"weights": np.ones(8, np.float32)})

    outcome = backend.run_pass(work, backward=True)

    assert list(outcome.failures) == [2]
    assert str(error) in outcome.failures[2]
    assert outcome.results[2] is None
    for one, together in zip(alone, [result for i, result in enumerate(outcome.results) if i != 2], strict=True):
        assert together is not None
        np.testing.assert_allclose(together.logprobs, one.logprobs, rtol=2e-6, atol=1e-5)
    for name in "ab":
        assert_same(gradients(backend, name), expected[name])
    assert (backend.tokens_per_pass < backend.config.tokens_per_pass) == (kind == "memory")


@pytest.mark.parametrize(("dtype", "passes_before"), [("float32", 0), ("bfloat16", 1)])
def test_memory_that_runs_out_at_any_operation_of_a_pass_counts_no_gradient_twice(
    family_dir: Callable[[str], Path], dtype: str, passes_before: int
) -> None:
    base = load(family_dir("qwen3"), dtype=dtype)
    backend, render = backend_with(base, a=4, b=4), renderer(base)
    work = [datum("ab"[i % 2], render.render([random_tokens(i, 6)]), i) for i in range(4)]

    def run(fails: int) -> tuple[int, dict[str, list[torch.Tensor]]]:
        for _ in range(passes_before):
            compute(backend, work)
        with MemoryEnds(fails) as operations:
            assert len(compute(backend, work)) == 4
        return operations.count, {name: gradients(backend, name) for name in "ab"}

    total, expected = run(fails=0)
    # The copy to the host, what makes the sums of both models ready, the end of the backward pass, and far inside of the pass.
    for at in (total, total - 1, total - 20, total - 50, total // 2):
        _, found = run(at)
        for name in "ab":
            for gradient, wanted in zip(found[name], expected[name], strict=True):
                # Halves round otherwise than the whole does; a gradient that counted twice would be off by all of itself.
                assert (gradient - wanted).norm() <= 0.05 * wanted.norm()
