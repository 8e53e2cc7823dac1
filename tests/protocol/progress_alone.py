"""Cases of `test_progress.py`: signs that a process gets on are its own work, that of what it has started, and waiting for others."""

import subprocess
import sys
import threading
import time

import psutil

from tests.running import START_S
from tinsmith.protocol.progress import Progress


def of_others() -> float:
    """Seconds of a processor that the threads beside this one have used."""
    return time.process_time() - time.thread_time()


def test_a_process_that_only_looks_is_still_until_it_waits() -> None:
    progress = Progress()
    progress.look(1.0, waits=True)
    for expected in (10.0, 20.0):
        progress.look(10.0, waits=False)
        assert progress.still_s == expected
    progress.look(10.0, waits=True)
    assert progress.still_s == 0.0


def test_a_thread_that_computes_is_a_sign() -> None:
    progress = Progress()
    progress.look(1.0, waits=False)
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            pass

    threading.Thread(target=compute, daemon=True).start()
    try:
        before, deadline = of_others(), time.monotonic() + START_S
        while of_others() - before < 0.05:
            assert time.monotonic() < deadline
        progress.look(1.0, waits=False)
        assert progress.still_s == 0.0
    finally:
        ended.set()


def test_a_process_that_was_started_is_a_sign_while_it_computes() -> None:
    """As a compiler whose result is waited for."""
    progress = Progress()
    progress.look(10.0, waits=False)
    for code, still_s in (("while True: pass", 0.0), ("import time; print(flush=True); time.sleep(1000)", 10.0)):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
            try:
                if still_s:
                    assert child.stdout is not None
                    child.stdout.readline()  # it sleeps from now on
                progress.look(10.0, waits=False)
                assert progress.still_s == 0.0  # it has just come
                before, deadline = psutil.Process(child.pid).cpu_times().user, time.monotonic() + START_S
                while not still_s and psutil.Process(child.pid).cpu_times().user - before < 0.5:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                progress.look(10.0, waits=False)
                assert progress.still_s == still_s
            finally:
                child.kill()
