"""The worker's loop: how it ends."""

import os
import threading
from pathlib import Path

import pytest

from tests.engine.here import Here
from tinsmith.config import Config, SamplingConfig
from tinsmith.errors import DeviceLostError
from tinsmith.models.base import BaseModel
from tinsmith.protocol.place import Place
from tinsmith.worker.loop import DISK_THREADS, disk_for_snapshots


def test_a_worker_that_breaks_down_begins_nothing_more(text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its process would live until all saves that had queued were written, and the engine would wait for it."""
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


@pytest.mark.parametrize(("sampler", "workers", "gib"), [("local", 1, 32), ("local", 8, 4), ("vllm", 8, 32), ("none", 8, 32)])
def test_workers_that_sample_divide_the_disk_for_snapshots(sampler: str, workers: int, gib: int) -> None:
    """Each writes those that its memory has no room for, so that the server would take the limit as many times. vLLM has one that does."""
    config = Config(sampling=SamplingConfig(sampler=sampler, snapshot_disk_gib=32))
    assert disk_for_snapshots(config, Place(0, workers)) == gib * 2**30
