"""Signs that a process gets on, judged in a process of its own: in this one other tests have left threads and children.

Invariant: A worker that hangs is killed by name, whether it is silent or beats, and none that computes or waits for
another is. Also: `tests/engine/test_worker_process.py`, `tests/engine/test_worker_group.py`.
"""

import os
import subprocess
from pathlib import Path

from tests.preloaded import REAL_PYTHON
from tests.running import START_S

ROOT = Path(__file__).parents[2]


def test_signs_of_progress() -> None:
    command = [REAL_PYTHON, "-m", "tests.protocol.progress_alone"]
    environment = os.environ | {"TINSMITH_TEST_ORDER": ""}  # the last leaves a thread that nothing ends
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert "9 passed" in ended.stdout


LOOKS = """
import gc, os, random, sys, threading, time
from tinsmith.protocol.heartbeat import Progress

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        for _ in range(50):
            pass

def deep(calls):
    if calls:
        deep(calls - 1)

def work():
    for _ in range(20):
        deep(random.randrange(300))
        Garbage()

def come_and_go():
    while True:
        beside = threading.Thread(target=work)
        beside.start()
        beside.join()

sys.setswitchinterval(1e-6)
gc.set_threshold(20)
for _ in range(3):
    threading.Thread(target=come_and_go).start()
progress, until = Progress(), time.monotonic() + 1
while time.monotonic() < until:
    progress.look(1, "at work")
print("gc is enabled:", gc.isenabled(), flush=True)
os._exit(0)
"""


def test_threads_that_end_while_they_are_looked_at_crash_nothing() -> None:
    """CPython 3.11 crashed at once when garbage was collected during a look."""
    ended = subprocess.run(
        [REAL_PYTHON, "-X", "faulthandler", "-c", LOOKS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "gc is enabled: True\n"
