"""Operations that are given up while a thread prepares them."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bases import png
from tests.engine.here import LONG_S, Here
from tinsmith.models.base import BaseModel
from tinsmith.protocol.work import Prepare, Prepared


def prepared_late(base: BaseModel, directory: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Here, Prepare, threading.Event]:
    """A worker that is asked to prepare an operation, the message that asks, and the event without which its picture is not read."""
    here, released = Here({"tiny": base}, directory), threading.Event()
    passes = here.worker.passes
    read = passes.bases["tiny"].renderer.read_blob

    def late(digest: bytes) -> bytes:
        assert released.wait(LONG_S)
        return read(digest)

    monkeypatch.setattr(passes.bases["tiny"].renderer, "read_blob", late)
    here.create("a")
    here.forward("a", 1, pictures=[png(1)])
    here.until(lambda: passes.preparing)
    (message,) = passes.preparing.values()
    return here, message, released


def test_an_operation_that_is_dropped_and_asked_for_again_is_answered_once(
    vision_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does so when an operation before it cannot be read: both threads may still be at work on the first request."""
    here, message, released = prepared_late(vision_base, tmp_path, monkeypatch)
    passes = here.worker.passes
    passes.drop([message.operation])
    passes.prepare(replace(message))
    released.set()
    here.settle()
    assert here.error("a", 1) is None
    assert passes.preparing == {}
    assert passes.datums == {}


def test_an_answer_to_a_dropped_request_is_not_taken_for_that_of_the_next(
    vision_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would be told to compute datums that it does not have yet."""
    here, message, released = prepared_late(vision_base, tmp_path, monkeypatch)
    here.engine.trainer.take(Prepared(message.number - 1, message.operation, True, [7], [{}]))
    here.turn()
    assert here.process.passes == []
    released.set()
    here.settle()
    assert here.error("a", 1) is None
