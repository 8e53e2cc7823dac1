"""The worker's loop: how it ends."""

import os
import threading
from pathlib import Path

import pytest

from tests.engine.here import Here
from tinsmith.errors import DeviceLostError
from tinsmith.models.base import BaseModel
from tinsmith.worker.loop import DISK_THREADS


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
