"""The worker's loop: what it tells of itself, and how it ends."""

import logging
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.here import Here
from tests.worker.test_samples import bench_of, sample
from tinsmith.config import Config, SamplingConfig
from tinsmith.errors import DeviceLostError
from tinsmith.models import compiled_kernels
from tinsmith.models.base import BaseModel
from tinsmith.models.compiled_kernels import compilations
from tinsmith.protocol.messages import Message
from tinsmith.protocol.place import Place
from tinsmith.protocol.work import WorkerStatus
from tinsmith.sampling.local.decode_graph import captures
from tinsmith.worker import status
from tinsmith.worker.loop import DISK_THREADS, disk_for_snapshots
from tinsmith.worker.status import WorkerStatusReporter


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


def test_graphs_are_reported_and_logged_once(
    text_base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "tinsmith")
    monkeypatch.setattr(status, "EVERY_S", 0.0)
    sent: list[Message] = []
    reporter = WorkerStatusReporter(bench_of(text_base, tmp_path).samples, sent.append)
    reporter.sum_up()
    caplog.clear()
    before = compilations()
    for variants in (2, 1, 0):
        for _ in range(variants):
            compiled_kernels._count_kernel(fn=SimpleNamespace(name="a kernel"))  # as Triton calls it
        reporter.report()
        reporter.sum_up()
    told = [message.graphs for message in sent if isinstance(message, WorkerStatus)]
    assert told == [{"compiled": before + total, "captured": captures()} for total in (2, 3)]
    captured = f"{captures()} captured, 0 of them new"
    lines = [f"graphs of operations: {before + total} compiled, {new} of them new, {captured}" for total, new in ((2, 2), (3, 1))]
    assert [record.getMessage() for record in caplog.records if record.name == status.__name__] == lines


def test_a_sample_is_a_line_for_debugging_and_all_are_summed_up(
    text_base: BaseModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tinsmith")
    bench = bench_of(text_base, tmp_path)
    reporter = WorkerStatusReporter(bench.samples, lambda _: None)
    for number in range(3):
        bench.samples.add(sample(str(number)))
    bench.settle()
    for _ in range(2):
        reporter.sum_up()
    lines = [(record.levelname, record.getMessage().partition(" in ")[0]) for record in caplog.records]
    assert [line for level, line in lines if level == "INFO" and line.startswith("samples")] == ["samples: 3 finished, 12 tokens"]
    assert sum(level == "DEBUG" and line.startswith("sample=") for level, line in lines) == 3
