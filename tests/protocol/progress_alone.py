"""Cases of `test_progress.py`: signs that a process gets on are its own work and that of what it has started and waits
for."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.preloaded import REAL_PYTHON
from tests.running import START_S
from tinsmith.protocol.heartbeat import Exchanges, Progress

WORK = "at work"
"""What a process is doing that has something to do."""


USED_S = 0.3
"""Seconds of a processor between two looks: more than the share of ten seconds that is a sign."""


def of_others() -> float:
    """Seconds of a processor that the threads beside this one have used."""
    return time.process_time() - time.thread_time()


def spin(ended: threading.Event) -> None:
    """Use a processor in one and the same call, for hours."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def compute(ended: threading.Event) -> None:
    """Use a processor in one call after the other."""
    rounds = 0
    while not ended.is_set():
        rounds = rounds % 1000 + 1
        hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)


def come_on(ended: threading.Event) -> None:
    """Use next to nothing, and go on all the time."""
    while not ended.wait(0.01):
        for _ in range(3):
            time.sleep(0.01)


@contextmanager
def thread(work: Callable[[threading.Event], None], name: str = "work", daemon: bool = False) -> Iterator[None]:
    """A thread that does that beside this one. One that spins is the process's last: nothing can end it."""
    ended = threading.Event()
    beside = threading.Thread(target=work, args=(ended,), name=name, daemon=daemon)
    beside.start()
    yield
    ended.set()
    if work is not spin:
        beside.join()


def looks(progress: Progress, count: int, used_s: float) -> tuple[float, float]:
    """The least of `still_s` and `stuck_s` in so many looks, 10 s apart, between which other threads use that much of a
    processor."""
    found = []
    for _ in range(count):
        before, deadline = of_others(), time.monotonic() + START_S
        while of_others() - before < used_s:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.02)
        progress.look(10.0, WORK)
        found.append((progress.still_s, progress.stuck_s))
    return min(still_s for still_s, _ in found), min(stuck_s for _, stuck_s in found)


def test_a_process_that_only_looks_is_still_until_it_does_something_else() -> None:
    progress, exchanges = Progress(), Exchanges()

    def look() -> tuple[float, float]:
        progress.look(10.0, (WORK, exchanges.waits, exchanges.begun))
        return progress.still_s, progress.stuck_s

    assert [look(), look(), look()] == [(0.0, 0.0), (10.0, 10.0), (20.0, 20.0)]
    with exchanges.one():
        assert [look(), look()] == [(0.0, 0.0), (10.0, 10.0)]
    with exchanges.one():  # nobody has looked in between
        assert [look(), look()] == [(0.0, 0.0), (10.0, 10.0)]
    assert [look(), look()] == [(0.0, 0.0), (10.0, 10.0)]
    progress.look(10.0, None)
    assert (progress.still_s, progress.stuck_s) == (0.0, 0.0)  # without work nothing has to move


@pytest.mark.parametrize(
    ("work", "name", "daemon", "count", "used_s", "signs"),
    [
        (compute, "work", False, 2, USED_S, 2),
        (come_on, "work", False, 10, 0.0, 10),  # however little it uses
        (come_on, "work", True, 20, 0.0, 0),  # as the monitor of progress bars, which outlives every download
        (compute, "vllm", True, 2, USED_S, 0),  # for which nobody waits
        (compute, "heartbeat", True, 2, USED_S, 0),
    ],
)
def test_a_thread_that_somebody_waits_for_is_a_sign_when_it_computes_or_comes_on(
    work: Callable[[threading.Event], None], name: str, daemon: bool, count: int, used_s: float, signs: int
) -> None:
    progress = Progress()
    with thread(work, name, daemon):
        looks(progress, 1, used_s)
        found, deadline = [looks(progress, 1, used_s) for _ in range(count)], time.monotonic() + START_S
        while [still_s for still_s, _ in found].count(0.0) < signs:  # on a busy machine it is often found where it was
            assert time.monotonic() < deadline
            found.append(looks(progress, 1, used_s))
    if not signs:
        assert min(found) == (10.0, 10.0)


def use(pid: int, seconds: float) -> None:
    """Wait until a process has used that much more of a processor."""
    process, deadline = psutil.Process(pid), time.monotonic() + START_S
    until = process.cpu_times().user + seconds
    while process.cpu_times().user < until:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("own_group", [False, True], ids=["compiler", "server"])
def test_a_process_that_was_started_is_a_sign_while_it_computes(own_group: bool) -> None:
    """As a compiler whose result is waited for, but not as a server, which has a process group of its own."""
    progress = Progress()
    progress.look(10.0, WORK)
    progress.look(10.0, WORK)
    assert progress.still_s == 10.0
    begin = "import os; os.setpgrp(); " if own_group else ""
    for code, computes in (
        ("print(flush=True)\nwhile True: pass", True),
        ("import time; print(flush=True); time.sleep(1000)", False),
    ):
        with subprocess.Popen([REAL_PYTHON, "-c", begin + code], stdout=subprocess.PIPE) as child:
            try:
                assert child.stdout is not None
                child.stdout.readline()  # it computes or sleeps from now on
                progress.look(10.0, WORK)
                assert (progress.still_s == 0.0) == (not own_group)  # it has just come
                for _ in range(5):  # a page that is read from a disk is a sign too, for a moment
                    use(child.pid, USED_S if computes else 0.0)
                    progress.look(10.0, WORK)
                    found = progress.still_s == 0.0, progress.stuck_s >= 10.0
                    if found == (computes and not own_group, True):  # whatever it computes: a sign, but not for ever
                        break
                assert found == (computes and not own_group, True)
            finally:
                child.kill()
        progress.look(10.0, WORK)


def test_a_thread_that_spins_in_one_call_moves_and_does_not_come_on() -> None:
    """The last: it cannot be ended."""
    progress = Progress()
    with thread(spin):
        looks(progress, 1, USED_S)
        found = looks(progress, 2, USED_S)
    assert found == (0.0, 10.0)


if __name__ == "__main__":
    ended = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__])
    sys.stdout.flush()
    os._exit(ended)  # a thread spins
