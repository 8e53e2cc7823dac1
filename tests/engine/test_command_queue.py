"""Commands run by seq_id whatever order they come in; a gap is given up after a while."""

from tinsmith.engine.command_queue import CommandQueue
from tinsmith.store.records import Command


def command(seq_id: int, model_id: str = "m", created_at: float = 0.0) -> Command:
    return Command(seq_id, model_id, seq_id, "forward_backward", b"", created_at)


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
    assert queue.ready() == ["m"]
    assert taken(queue) == [0]
    assert queue.ready() == []
    queue.add(command(1))
    assert taken(queue) == [1, 2, 3]


def test_models_do_not_wait_for_each_other() -> None:
    queue = CommandQueue(held_s=10)
    queue.add(command(5, "a"))
    queue.add(command(0, "b"))
    assert queue.ready() == ["b"]


def test_a_gap_is_given_up_and_names_what_is_missing() -> None:
    queue = CommandQueue(held_s=10)
    queue.add(command(0))
    assert taken(queue) == [0]
    queue.add(command(3, created_at=100.0))
    queue.add(command(4, created_at=104.0))
    assert queue.next_deadline() == 110.0
    assert queue.overdue(now=109.9) == []
    (overdue,) = queue.overdue(now=110.1)
    assert (overdue.command.seq_id, overdue.missing) == (3, 1)
    assert taken(queue) == [4]
    assert queue.next_deadline() is None
    assert not queue.add(command(1, created_at=111.0))


def test_dropping_a_model_returns_what_it_still_had() -> None:
    queue = CommandQueue(held_s=10)
    for seq in (7, 3):
        queue.add(command(seq))
    assert [c.seq_id for c in queue.drop("m")] == [3, 7]
    assert queue.drop("m") == []
