"""Passes that fail, through the trainer: each result is its own datum's, and the operation that fails is the guilty one."""

import re
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from tests.bases import png
from tests.engine.here import LONG_S, Here
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import Effort
from tinsmith.models.pictures import PictureInput
from tinsmith.store.records import Outcome
from tinsmith.training.backend import DatumResult, DatumWork
from tinsmith.wire import tinker_pb2

GUILTY = 9
"""Length of the datum that fails."""

ERRORS = [torch.OutOfMemoryError("Tried to allocate 20.00 GiB"), RuntimeError("a kernel failed"), KeyError("no such thing")]


@pytest.fixture
def here(text_base: BaseModel, tmp_path: Path) -> Here:
    made = Here({"tiny": text_base}, tmp_path, training=TrainingConfig(tokens_per_pass=64))
    made.create("a")
    made.settle()
    return made


def fail_on_guilty(here: Here, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Every pass with the guilty datum raises, where torch would."""
    run = here.backend()._run

    def failing(work: Sequence[DatumWork], backward: bool, effort: Effort) -> list[DatumResult]:
        if any(len(datum.rendered) == GUILTY for datum in work):
            raise error
        return run(work, backward, effort)

    monkeypatch.setattr(here.backend(), "_run", failing)


def logprobs(outcome: Outcome) -> NDArray[np.float32]:
    """Of all datums of a forward, one after the other."""
    (record,) = tinker_pb2.ForwardBackwardOutput.FromString(outcome.result or b"").loss_fn_outputs
    return np.frombuffer(record.fields["logprobs"].data, np.float32)


@pytest.mark.parametrize("error", ERRORS, ids=["memory", "torch", "python"])
def test_a_forward_whose_first_datum_fails_is_failed_and_its_neighbours_have_their_own_results(
    here: Here, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for seq, lengths in enumerate([[3, 4], [5, 6]], start=1):
        here.forward("a", seq, lengths, forward_only=True)
    here.settle()
    expected = [logprobs(here.outcome("a", seq)) for seq in (1, 2)]
    fail_on_guilty(here, monkeypatch, error)

    for seq, lengths in enumerate([[3, 4], [GUILTY, 4], [5, GUILTY], [5, 6]], start=3):
        here.forward("a", seq, lengths, forward_only=True)
    here.settle()

    reason = f"the pass failed: .*{error.args[0]}"
    for seq, index in ((4, 0), (5, 1)):
        assert re.match(f"datum {index}: {reason}", str(here.error("a", seq)))
    assert [here.error("a", seq) for seq in (3, 6)] == [None, None]
    for seq, wanted in ((3, expected[0]), (6, expected[1])):
        np.testing.assert_allclose(logprobs(here.outcome("a", seq)), wanted, rtol=2e-6, atol=1e-5)


def test_gradients_of_a_part_of_an_operation_that_failed_are_never_applied(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_guilty(here, monkeypatch, ERRORS[1])
    here.forward("a", 1, [4, GUILTY])
    here.forward("a", 2, [5])
    here.optim("a", 3)
    before = [tensor.clone() for tensor in here.backend().optimizers["s:train:a"].weights.tensors()]
    here.settle()
    assert "datum 1: the pass failed" in str(here.error("a", 1))
    assert here.error("a", 2) is None
    assert "the step was refused and the gradients are cleared, because an operation before it failed: seq_id 1" in str(here.error("a", 3))
    assert here.backend().optimizers["s:train:a"].gradients is None
    after = here.backend().optimizers["s:train:a"].weights.tensors()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_part_that_is_still_to_be_computed_when_its_operation_fails_leaves_no_gradients_either(
    vision_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has it already, because it is given passes ahead, and its picture takes long to decode."""
    here = Here({"tiny": vision_base}, tmp_path, training=TrainingConfig(tokens_per_pass=GUILTY))
    renderer = here.worker.passes.bases["tiny"].renderer
    process, released = renderer.processor, threading.Event()
    assert process is not None

    def late(sha256: bytes, image: Image) -> PictureInput:
        assert released.wait(LONG_S)
        return process(sha256, image)

    monkeypatch.setattr(renderer, "processor", late)
    fail_on_guilty(here, monkeypatch, ERRORS[1])
    here.create("a")
    here.forward("a", 1, [GUILTY], pictures=[png(1)])
    here.optim("a", 2)
    here.until(lambda: here.process.computed)
    assert len(here.process.passes) == 2
    for _ in range(10):
        here.turn()
    released.set()
    here.until(lambda: len(here.process.computed) == 2)
    here.settle()
    assert "datum 0: the pass failed" in str(here.error("a", 1))
    assert "the gradients are cleared, because an operation before it failed: seq_id 1" in str(here.error("a", 2))
    assert here.backend().optimizers["s:train:a"].gradients is None


def test_an_error_outside_of_the_passes_fails_what_took_part_and_the_trainer_goes_on(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(work: Sequence[DatumWork], backward: bool) -> None:
        raise ZeroDivisionError("division by zero")

    with monkeypatch.context() as patch:
        patch.setattr(here.backend(), "run_pass", broken)
        here.forward("a", 1, [4])
        here.settle()
    assert "division by zero" in str(here.error("a", 1))
    here.forward("a", 2, [4], forward_only=True)
    here.settle()
    assert here.error("a", 2) is None


def test_a_result_that_cannot_be_encoded_fails_its_operation_and_its_step_only(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> bytes:
        raise ValueError("the message exceeds 2 GB")

    with monkeypatch.context() as patch:
        patch.setattr("tinsmith.engine.trainer.encode_output", too_large)
        here.forward("a", 1, [4])
        here.settle()
    assert "the message exceeds 2 GB" in str(here.error("a", 1))
    here.optim("a", 2)
    here.forward("a", 3, [4])
    here.settle()
    assert "an operation before it failed: seq_id 1" in str(here.error("a", 2))
    assert here.error("a", 3) is None
