"""Processes that end with the one that started them."""

import signal
import subprocess

import psutil

from tests.preloaded import REAL_PYTHON

LONG_S = 30.0

CHILD = """
import os, signal
from tinsmith.protocol.child_process import end_with_parent
end_with_parent()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def test_a_stopped_process_ends_with_its_parent() -> None:
    with subprocess.Popen([REAL_PYTHON, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while child.status() != psutil.STATUS_STOPPED:
            pass
        parent.send_signal(signal.SIGKILL)
        assert psutil.wait_procs([child], LONG_S)[1] == []
