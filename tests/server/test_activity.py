"""Rates from the counters that the engine reports."""

import time

import pytest

from tinsmith.protocol.serving import Status
from tinsmith.server.activity import Activity


def test_rates_are_those_of_the_last_minute_and_a_new_engine_counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    activity = Activity()
    empty = activity.describe()
    assert empty["tokens_per_second"] == {"training": 0, "sampling": 0}
    for passed, trained, sampled, rates in (
        (0, 600, 60, (10, 1)),
        (30, 1200, 60, (20, 1)),
        (40, None, 60, (10, 0)),  # the first report is more than a minute old, the second is not
        (40, None, 60, (0, 0)),
        (0, 1800, 60, (10, 0)),
    ):
        now += passed
        if trained is not None:
            activity.take(Status([], [{"pid": 7}], 1, 2, trained, sampled, {"resident": 5}, {"compiled": 3}))
        described = activity.describe()
        assert described["tokens_per_second"] == dict(zip(("training", "sampling"), rates, strict=True))
    assert (described["workers"], described["samples"]) == ([{"pid": 7}], {"running": 1, "waiting": 2})
    activity.clear()
    assert activity.describe() == empty
    activity.take(Status([], [], 0, 0, 600, 0, {}, {}))
    assert activity.describe()["tokens_per_second"]["training"] == 10
