"""Reports of a worker's work.

Invariant: The memory that `tinsmith status` shows is reported again whenever the device has done something.
"""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tinsmith.protocol.messages import Message
from tinsmith.worker import status
from tinsmith.worker.samples import Samples
from tinsmith.worker.status import WorkerStatusReporter


def test_memory_is_reported_again_when_a_pass_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when nothing happened, though memory always changes a little."""
    held = iter(range(100))
    monkeypatch.setattr(status, "memory_held", lambda: {"gpu": next(held)})
    monkeypatch.setattr(status, "EVERY_S", 0.0)
    idle: Any = SimpleNamespace(load=lambda: (0, 0), results=SimpleNamespace(finished=0, sampled_tokens=0))
    sent: list[Message] = []
    reporter = WorkerStatusReporter(cast(Samples, idle), sent.append)
    reporter.report()
    reporter.report()
    assert len(sent) == 1
    reporter.done += 1
    reporter.report()
    assert [cast(Any, message).memory for message in sent] == [{"gpu": 0}, {"gpu": 1}]
