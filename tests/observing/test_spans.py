"""What a process notes of what it did."""

from tinsmith.observing.spans import DEVICE, MOST, PASSES, SHORTEST_S, Activities, SpanBuffer


def test_what_is_noted_is_taken_once_and_the_oldest_goes_if_it_is_too_much() -> None:
    spans = SpanBuffer()
    for number in range(MOST + 3):
        spans.note("backward", PASSES, float(number), 0.5, tokens=7)
    taken = spans.take()
    assert [taken[0], len(taken)] == [("backward", PASSES, 3.0, 0.5, {"tokens": 7}), MOST]
    assert spans.take() == []


def test_activities_come_one_after_the_other_without_gaps() -> None:
    """A short one belongs to the one before, and equal ones that follow are one."""
    spans = SpanBuffer()
    activities = Activities(spans, DEVICE)
    short = SHORTEST_S / 2
    for name, began, ended in (
        ("sampling", 10.0, 11.0),
        ("other", 11.0, 11.0 + short),
        ("sampling", 11.0 + short, 12.0),
        ("backward", 12.0, 15.0),
        ("other", 15.0, 16.0),
    ):
        activities.ended(name, began, ended)
    assert [span[:4] for span in spans.take()] == [("sampling", DEVICE, 10.0, 2.0), ("backward", DEVICE, 12.0, 3.0)]
    activities.flush()
    assert [span[:4] for span in spans.take()] == [("other", DEVICE, 15.0, 1.0)]
    activities.ended("other", 16.0, 17.0)
    activities.flush()
    assert [span[:4] for span in spans.take()] == [("other", DEVICE, 16.0, 1.0)]
