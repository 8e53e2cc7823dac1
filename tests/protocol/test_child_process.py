"""Processes that end with the one that started them."""

import ctypes
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.preloaded import REAL_PYTHON

LONG_S = 30.0

_PR_SET_CHILD_SUBREAPER = 36

CHILD = """
import os, signal
from {module} import end_with_parent
os.setpgrp()
end_with_parent()
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = "import subprocess as s, sys; s.Popen([sys.executable, '-c', {child!r}], stdin=s.PIPE).wait()"
SERVER = """
import asyncio
from tinsmith.server.parser_process import ParserProcess
parser = ParserProcess()
asyncio.run(parser.run(len, b"body", "identity", 9))
print(parser._process.pid, flush=True)
input()
"""


@pytest.fixture
def adopting() -> Iterator[None]:
    """Be the next parent of orphans: otherwise the kernel lets stopped ones go on that have a group of their own."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.usefixtures("adopting")
@pytest.mark.parametrize(
    "code",
    [
        PARENT.format(child=CHILD.format(module="tinsmith.protocol.child_process")),
        PARENT.format(child=CHILD.format(module="tinsmith.sampling.inside_vllm.launcher")),
        SERVER,
    ],
    ids=["worker", "vLLM", "parser"],
)
def test_a_stopped_process_ends_with_its_parent(code: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([REAL_PYTHON, "-c", code], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        child.suspend()
        while child.status() != psutil.STATUS_STOPPED:
            pass
        parent.kill()
        _, left = psutil.wait_procs([child], LONG_S)
        for each in left:
            each.kill()
        assert left == []
