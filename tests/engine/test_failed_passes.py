"""Passes that fail, through the trainer: each result is its own datum's, and the operation that fails is the guilty one."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.engine.test_trainer import Bench
from tinsmith.models.base import BaseModel
from tinsmith.store.records import Outcome
from tinsmith.training.backend import DatumResult, DatumWork
from tinsmith.wire import tinker_pb2

GUILTY = 7
"""Length of the datum that fails."""

ERRORS = [torch.OutOfMemoryError("Tried to allocate 20.00 GiB"), RuntimeError("a kernel failed"), KeyError("no such thing")]


@pytest.fixture
def bench(text_base: BaseModel, tmp_path: Path) -> Bench:
    made = Bench(text_base, tmp_path)
    made.create("a")
    made.settle()
    return made


def fail_on_guilty(bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Every pass with the guilty datum raises, where torch would."""
    run = bench.backend._run

    def failing(work: Sequence[DatumWork], backward: bool) -> list[DatumResult]:
        if any(len(datum.rendered) == GUILTY for datum in work):
            raise error
        return run(work, backward)

    monkeypatch.setattr(bench.backend, "_run", failing)


def logprobs(outcome: Outcome) -> NDArray[np.float32]:
    """Of all datums of a forward, one after the other."""
    (record,) = tinker_pb2.ForwardBackwardOutput.FromString(outcome.result or b"").loss_fn_outputs
    return np.frombuffer(record.fields["logprobs"].data, np.float32)


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "torch", "python"])
def test_a_forward_whose_first_datum_fails_is_failed_and_its_neighbours_have_their_own_results(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for seq, lengths in enumerate([[3, 4], [5, 6]], start=1):
        bench.forward("a", seq, lengths, forward_only=True)
    bench.settle()
    expected = [logprobs(bench.outcomes[f"s:train:a/{seq}"]) for seq in (1, 2)]
    fail_on_guilty(bench, monkeypatch, error)

    for seq, lengths in enumerate([[3, 4], [GUILTY, 4], [5, GUILTY], [5, 6]], start=3):
        bench.forward("a", seq, lengths, forward_only=True)
    bench.settle()

    reason = f"the pass failed: .*{error.args[0]}"
    for seq, index in ((4, 0), (5, 1)):
        assert re.match(f"datum {index}: {reason}", str(bench.error("a", seq)))
    assert [bench.error("a", seq) for seq in (3, 6)] == [None, None]
    for seq, wanted in ((3, expected[0]), (6, expected[1])):
        np.testing.assert_allclose(logprobs(bench.outcomes[f"s:train:a/{seq}"]), wanted, rtol=2e-6, atol=1e-5)


def test_gradients_of_a_part_of_an_operation_that_failed_are_never_applied(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_guilty(bench, monkeypatch, ERRORS[1])
    bench.forward("a", 1, [4, GUILTY])
    bench.forward("a", 2, [5])
    bench.optim("a", 3)
    before = [tensor.clone() for tensor in bench.backend.optimizers["s:train:a"].weights.tensors()]
    bench.settle()
    assert "datum 1: the pass failed" in str(bench.error("a", 1))
    assert bench.error("a", 2) is None
    assert "the step was refused and the gradients are cleared, because an operation before it failed: seq_id 1" in str(bench.error("a", 3))
    assert bench.backend.optimizers["s:train:a"].gradients is None
    after = bench.backend.optimizers["s:train:a"].weights.tensors()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_an_error_outside_of_the_passes_fails_what_took_part_and_the_trainer_goes_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: Sequence[DatumWork], backward: bool) -> None:
        raise ZeroDivisionError("division by zero")

    with monkeypatch.context() as patch:
        patch.setattr(bench.backend, "run_pass", broken)
        bench.forward("a", 1, [4])
        bench.settle()
    assert "division by zero" in str(bench.error("a", 1))
    bench.forward("a", 2, [4], forward_only=True)
    bench.settle()
    assert bench.error("a", 2) is None


def test_a_result_that_cannot_be_encoded_fails_its_operation_and_its_step_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> bytes:
        raise ValueError("the message exceeds 2 GB")

    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.engine.trainer.encode_output", too_large)
        bench.forward("a", 1, [4])
        bench.settle()
    assert "the message exceeds 2 GB" in str(bench.error("a", 1))
    bench.optim("a", 2)
    bench.forward("a", 3, [4])
    bench.settle()
    assert "an operation before it failed: seq_id 1" in str(bench.error("a", 2))
    assert bench.error("a", 3) is None
