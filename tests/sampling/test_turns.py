"""Sessions take turns."""

import pytest

from tinsmith.sampling.turns import Turns


def three_sessions() -> Turns[str]:
    turns: Turns[str] = Turns()
    for item in ("a1", "a2", "a3", "b1", "c1", "c2"):
        turns.add(item[0], item)
    return turns


def test_sessions_are_served_in_turn_and_each_in_its_order() -> None:
    turns = three_sessions()
    assert (list(turns), len(turns)) == (["a1", "b1", "c1", "a2", "c2", "a3"], 6)
    served = []
    while turns:
        item = next(iter(turns))
        turns.take(item[0], item)
        served.append(item)
    assert served == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_who_was_served_comes_last_and_who_was_skipped_or_put_back_keeps_its_turn() -> None:
    turns = three_sessions()
    turns.take("b", "b1")
    turns.take("c", "c2")
    turns.add("b", "b2")
    assert turns.sessions == ["a", "c", "b"]
    assert list(turns) == ["a1", "c1", "b2", "a2", "a3"]
    turns.take("a", "a1")
    turns.put_back("a", "a1")
    assert turns.first("a") == "a1"
    assert list(turns) == ["c1", "b2", "a1", "a2", "a3"]


def test_items_may_be_taken_while_one_looks_at_all_and_what_is_gone_is_dropped_and_returned() -> None:
    turns = three_sessions()
    for item in turns:
        if item.endswith("1"):
            turns.take(item[0], item)
    assert list(turns) == ["a2", "c2", "a3"]
    assert turns.drop(lambda item: item.startswith("a")) == ["a2", "a3"]
    assert turns.sessions == ["c"]
    assert turns.drop(lambda item: item == "b1") == []
    with pytest.raises(KeyError):
        turns.first("a")
    turns.clear()
    assert not turns
