"""Threads beside the device: their results come back to one thread."""

import logging
import threading
import time
from functools import partial

import pytest

from tests.engine.here import LONG_S
from tinsmith.protocol.link import ChildLink, ParentLink
from tinsmith.worker.background import Background


def delivered(background: Background) -> None:
    """Deliver until nothing is running."""
    deadline = time.monotonic() + LONG_S
    while background.running:
        assert time.monotonic() < deadline
        background.deliver()
        time.sleep(0.001)


def test_work_is_done_in_a_thread_and_its_result_or_error_handed_over_in_ours_when_it_is_asked_for() -> None:
    woken = threading.Event()
    background = Background("test", 1, woken.set)
    ends: list[tuple[object, str]] = []
    for work in (lambda: threading.current_thread().name, lambda: int("no number")):
        background.run(
            work, lambda ended: ends.append((ended.exception() or ended.result(), threading.current_thread().name))
        )
        assert woken.wait(LONG_S)
        woken.clear()
    assert (ends, background.has_ended, background.running) == ([], True, 2)
    background.deliver()
    assert (background.has_ended, background.running) == (False, 0)
    (name, error), here = zip(*ends, strict=True)
    assert str(name).startswith("test")
    assert isinstance(error, ValueError)
    assert here == (threading.current_thread().name,) * 2


def test_sessions_take_turns_in_a_pool_that_is_busy() -> None:
    background, order, go_on = Background("test", 1, lambda: None), list[str](), threading.Event()
    background.run(lambda: go_on.wait(LONG_S), lambda _: None)
    for name in ("many 1", "many 2", "many 3", "few 1", "few 2", "one 1"):
        background.run(partial(order.append, name), lambda _: None, name.split()[0])
    go_on.set()
    delivered(background)
    assert order == ["many 1", "few 1", "one 1", "many 2", "few 2", "many 3"]


def test_closing_waits_for_nothing_begins_nothing_and_wakes_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    """What runs may end after the link is gone, and what it would wake up then is somebody else's file."""
    caplog.set_level(logging.DEBUG)
    parent = ParentLink()
    link = ChildLink(parent.address)
    background = Background("test", 1, link.wake)
    go_on, over, begun = threading.Event(), threading.Event(), []

    def long() -> None:
        begun.append("long")
        go_on.wait(LONG_S)
        over.set()

    background.run(long, lambda _: begun.append("handed over"))
    background.run(lambda: begun.append("waiting"), lambda _: begun.append("handed over"))
    while not begun:
        time.sleep(0.001)
    background.close()
    link.close()
    parent.close()
    assert not over.is_set()
    go_on.set()
    background._pool.shutdown(wait=True)
    background.deliver()
    assert begun == ["long"]
    assert caplog.text == ""


def test_closing_waits_for_who_is_being_woken() -> None:
    """Its link is closed right behind it."""
    go_on, waking, closed, woken = (threading.Event() for _ in range(4))

    def wake() -> None:
        waking.set()
        assert not closed.wait(0.2)
        woken.set()

    background = Background("test", 1, wake)
    background.run(lambda: go_on.wait(LONG_S), lambda _: None)
    go_on.set()
    assert waking.wait(LONG_S)
    background.close()
    closed.set()
    assert woken.is_set()
