"""Commands run by seq_id whatever order they come in; a gap is given up after a while."""

import time

import pytest

from tinsmith.engine.command_queue import CommandQueue
from tinsmith.store.records import Command


def command(seq_id: int, model_id: str = "m") -> Command:
    return Command(seq_id, model_id, seq_id, "forward_backward", 0, created_at=time.time())


def taken(queue: CommandQueue, model_id: str = "m") -> list[int]:
    """Take all that is ready."""
    found = []
    while queue.models[model_id].head() is not None:
        found.append(queue.models[model_id].take().seq_id)
    return found


def test_early_arrivals_are_held() -> None:
    queue = CommandQueue(held_s=10)
    for seq in (2, 3, 0):
        assert queue.add(command(seq))
    queue.add(command(5, "another"))
    assert queue.ready() == ["m"]
    assert taken(queue) == [0]
    assert queue.ready() == []
    queue.add(command(1))
    assert taken(queue) == [1, 2, 3]


def test_a_gap_is_given_up_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the clock is set meanwhile: what counts is monotonic time."""
    now, clock = 100.0, 1e9
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "time", lambda: clock)
    queue = CommandQueue(held_s=10)
    queue.add(command(0))
    assert taken(queue) == [0]
    queue.add(command(3))
    now, clock = 104.0, 1e9 - 3600
    queue.add(command(4))
    assert queue.next_deadline() == 110.0
    assert queue.overdue(now=109.9) == []
    (overdue,) = queue.overdue(now=110.1)
    assert (overdue.command.seq_id, overdue.missing) == (3, 1)
    assert taken(queue) == [4]
    assert queue.next_deadline() is None
    assert not queue.add(command(1))


def test_a_command_that_is_put_back_is_the_next_again_and_what_is_cancelled_comes_in_order() -> None:
    queue = CommandQueue(held_s=10)
    for seq in (0, 1):
        queue.add(command(seq))
    queue.models["m"].put_back(queue.models["m"].take())
    assert taken(queue) == [0, 1]
    for seq in (7, 3):
        queue.add(command(seq))
    assert [c.seq_id for c in queue.cancel("m")] == [3, 7]
    assert queue.cancel("m") == []
