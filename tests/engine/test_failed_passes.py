"""Passes that fail, through the trainer: each result is its own datum's, and the operation that fails is the guilty one."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL.Image import Image

from tests.bases import png
from tests.engine.here import LONG_S, Here
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import Effort
from tinsmith.models.pictures import PictureInput
from tinsmith.training.backend import DatumResult, DatumWork

GUILTY = 9
"""Length of the datum that fails."""


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


def test_gradients_of_a_part_of_an_operation_that_failed_are_never_applied(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on_guilty(here, monkeypatch, RuntimeError("a kernel failed"))
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
    fail_on_guilty(here, monkeypatch, RuntimeError("a kernel failed"))
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
