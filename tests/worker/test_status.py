"""What a worker tells of itself: the graphs of operations that it has made, each once."""

import logging
from pathlib import Path

import pytest
import torch

from tests.worker.test_samples import bench_of
from tinsmith.models.base import BaseModel
from tinsmith.models.compiled import compilations
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import WorkerStatus
from tinsmith.sampling.local.decode_graph import captures
from tinsmith.worker import status
from tinsmith.worker.status import WorkerStatusReporter


@torch.compile(backend="eager")
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Compiled once for each number of dimensions."""
    return x + x


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
    for new, dimensions in ((2, (1, 2)), (1, (3,)), (0, (1,))):
        for count in dimensions:
            doubled(torch.ones([3] * count))
        reporter.report()
        reporter.sum_up()
        assert compilations() == before + (2 if new == 2 else 3)
    told = [message.graphs for message in sent if isinstance(message, WorkerStatus)]
    assert told == [{"compiled": before + total, "captured": captures()} for total in (2, 3)]
    captured = f"{captures()} captured, 0 of them new"
    lines = [f"graphs of operations: {before + total} compiled, {new} of them new, {captured}" for total, new in ((2, 2), (3, 1))]
    assert [record.getMessage() for record in caplog.records if record.name == status.__name__] == lines
