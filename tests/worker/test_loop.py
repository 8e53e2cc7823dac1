"""The worker's loop: what it tells of itself, and how it ends."""

import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.engine.here import Here
from tinsmith.config import Config, SamplingConfig
from tinsmith.errors import DeviceLostError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import CreateModel, Drop
from tinsmith.training.backend import DatumWork, PassResult
from tinsmith.worker.loop import DISK_THREADS, disk_for_snapshots


def test_a_worker_that_breaks_down_begins_nothing_more(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its process would live until all queued saves were written, and the engine would wait for it."""
    worker = Here({"tiny": text_base}, tmp_path).process.worker
    over, begun = threading.Event(), list[int]()

    def save() -> None:
        begun.append(1)
        over.wait()

    def break_down() -> None:
        raise DeviceLostError("it is gone")

    for _ in range(DISK_THREADS + 3):
        worker.disk.run(save, lambda _: None)
    monkeypatch.setattr(worker, "turn", break_down)
    try:
        with pytest.raises(DeviceLostError):
            worker.run(os.getppid())
    finally:
        over.set()
    worker.disk._pool.shutdown(wait=True)
    assert len(begun) == DISK_THREADS


def test_what_comes_in_the_middle_of_a_pass_is_seen_there_and_handled_behind_it(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here({"tiny": text_base}, tmp_path)
    here.create("a")
    here.settle()
    arriving, begun, run = list[Message](), list[int](), here.backend().run_pass

    def in_the_middle(work: Sequence[DatumWork], *more: Any) -> PassResult:
        begun.append(len(work))
        arriving.extend([Drop(["s:train:a/1"]), CreateModel(10**6, "tiny", "made", asdict(LoraShape(4, seed=1)))])
        return run(work, *more)

    def receive(timeout_s: float) -> list[Message]:
        taken, arriving[:] = arriving[:], []
        return taken

    monkeypatch.setattr(here.backend(), "run_pass", in_the_middle)
    monkeypatch.setattr(here.process.wire, "receive", receive)
    here.forward("a", 1, [5])
    here.settle()
    assert begun == [1]
    assert here.error("a", 1) == "the pass was given up: none of its operations is wanted any more"
    assert "made" in here.backend().optimizers


@pytest.mark.parametrize(
    ("sampler", "workers", "gib"), [("local", 1, 32), ("local", 8, 4), ("vllm", 8, 32), ("none", 8, 32)]
)
def test_workers_that_sample_divide_the_disk_for_snapshots(sampler: str, workers: int, gib: int) -> None:
    """Each writes those that its memory has no room for; together they keep to the limit. With vLLM only one does."""
    config = Config(sampling=SamplingConfig(sampler=sampler, snapshot_disk_gib=32))
    assert disk_for_snapshots(config, Place(0, workers)) == gib * 2**30
