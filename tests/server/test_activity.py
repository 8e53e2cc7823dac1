"""Rates from the counters that the engine reports."""

import time

import pytest

from tinsmith.protocol.serving import Status
from tinsmith.server.activity import Activity


def report(trained: int, sampled: int) -> Status:
    return Status([], [{"pid": 7}], 1, 2, trained, sampled, {"resident": 5}, {"compiled": 3})


def test_rates_are_those_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    activity = Activity()
    assert activity.describe()["tokens_per_second"] == {"training": 0, "sampling": 0}
    activity.take(report(600, 60))
    assert activity.describe()["tokens_per_second"] == {"training": 10, "sampling": 1}
    now += 30
    activity.take(report(1200, 60))
    assert activity.describe()["tokens_per_second"] == {"training": 20, "sampling": 1}
    now += 40  # the first report is more than a minute old, the second is not
    assert activity.describe()["tokens_per_second"] == {"training": 10, "sampling": 0}
    now += 40
    assert activity.describe()["tokens_per_second"] == {"training": 0, "sampling": 0}
    assert activity.describe()["samples"] == {"running": 1, "waiting": 2}
    activity.take(report(1800, 60))
    assert activity.describe()["tokens_per_second"] == {"training": 10, "sampling": 0}


def test_a_new_engine_counts_from_zero() -> None:
    activity = Activity()
    activity.take(report(6000, 0))
    assert activity.describe()["workers"] == [{"pid": 7}]
    assert activity.describe()["graphs"] == {"compiled": 3}
    activity.clear()
    assert activity.describe() == {
        "models": [],
        "workers": [],
        "samples": {"running": 0, "waiting": 0},
        "tokens_per_second": {"training": 0, "sampling": 0},
        "memory_bytes": {},
        "graphs": {},
    }
    activity.take(report(600, 0))
    assert activity.describe()["tokens_per_second"]["training"] == 10
