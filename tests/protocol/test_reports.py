"""Reports to the parent: what trains neither waits for them nor ends with them.

Invariant: Observing never slows or ends training: reports are dropped when the parent is behind, and end alone.
"""

import logging
import threading
import time
from collections.abc import Callable

import pytest

from tinsmith.protocol import reports
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import ParentLink
from tinsmith.protocol.reports import Reports
from tinsmith.protocol.serving import Alive
from tinsmith.protocol.work import WorkerStatus

LONG_S = 120.0
"""How long anything here may take on a busy machine."""

STATUS = WorkerStatus([["tinsmith_publishes_total", {"base_model": "x" * 10_000}, 1.0]], [])  # type: ignore[list-item]


def until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_reports_that_the_parent_does_not_take_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """None waits for it: 3,000 are made, of which it finds those for which there was room."""
    monkeypatch.setattr(reports, "EVERY_S", 0.0)
    monkeypatch.setattr(reports, "PAUSE", 0)
    parent = ParentLink()
    made, enough = 0, threading.Event()

    def make() -> WorkerStatus:
        nonlocal made
        made += 1
        if made == 3000:
            enough.set()
            threading.Event().wait()
        return STATUS

    Reports(parent.address, make).start()
    assert enough.wait(LONG_S)
    arrived = 0
    while batch := parent.heartbeats():
        arrived += len(batch)
        assert all(message == STATUS for message in batch)
    assert 0 < arrived < 1500
    parent.close()


def test_a_report_that_fails_ends_the_reports_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    parent = ParentLink()

    def make() -> WorkerStatus:
        raise ZeroDivisionError("counting went wrong")

    with caplog.at_level(logging.ERROR, "tinsmith"):
        Reports(parent.address, make).start()
        until(lambda: "this process reports nothing any more; its work goes on" in caplog.text)
    assert "counting went wrong" in caplog.text
    Heartbeat(parent.address).start()
    until(lambda: any(isinstance(message, Alive) for message in parent.heartbeats()))
    parent.close()


def test_a_report_takes_at_most_a_hundredth_of_the_time() -> None:
    assert [reports.pause_s(took_s) for took_s in (0.0, 0.01, 0.5)] == [1.0, 1.0, 50.0]


def test_what_a_report_waits_for_puts_off_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver, a full machine or SIGSTOP may hold up a report: that takes no time of what trains."""
    monkeypatch.setattr(reports, "EVERY_S", 0.01)
    monkeypatch.setattr(reports, "PAUSE", 1000)
    parent = ParentLink()
    made: list[WorkerStatus] = []

    def make() -> WorkerStatus:
        time.sleep(0.1)
        made.append(STATUS)
        return STATUS

    Reports(parent.address, make).start()
    until(lambda: len(made) >= 3)
    parent.close()
